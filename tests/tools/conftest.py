"""The command line with a fake engine in the place of the real one."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from widemesh.model.presets import PRESETS
from widemesh.model.tiny_tokenizer import tiny_tokenizer
from widemesh.serving.engine_calls import EngineError

FAKE_ENGINE = Path(__file__).parents[1] / "serving" / "grpc" / "fake_engine.py"


def _load_fake() -> Any:
    spec = importlib.util.spec_from_file_location("widemesh_test_fake_engine", FAKE_ENGINE)
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory) -> Path:
    """A folder with the tokenizer and config.json of the default preset, without weights."""
    folder = tmp_path_factory.mktemp("bytes")
    config = PRESETS["tiny-mesh"]
    tokenizer, tokenizer_config = tiny_tokenizer(config)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    return folder


@pytest.fixture
def fake_engine(monkeypatch) -> Callable[..., SimpleNamespace]:
    """`fake_engine(delay_s=...)` makes commands build fake engines; its result lists the `configs` and `engines`."""

    def install(**options: Any) -> SimpleNamespace:
        made = SimpleNamespace(configs=[], engines=[], EngineError=EngineError)

        def build(config: Any) -> Any:
            fake = _load_fake().FakeEngine(
                config.model, served_model_name=config.served_model_name, max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs, **options,
            )
            fake.transfer_bytes = 4096
            made.configs.append(config)
            made.engines.append(fake)
            return fake

        made.build = build
        module = SimpleNamespace(Engine=build, EngineError=EngineError)
        monkeypatch.setitem(sys.modules, "widemesh.serving.engine", module)
        return made

    return install
