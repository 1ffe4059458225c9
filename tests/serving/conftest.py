"""A small checkpoint and one engine over it for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from widemesh.serving import Engine, EngineConfig
from widemesh.tools.init_tiny import write_tiny

MAX_MODEL_LEN = 96


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny-mesh checkpoint in released form."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_tiny(folder, preset="tiny-mesh", seed=0, form="quantized")
    return folder


@pytest.fixture(scope="session")
def engine_config(checkpoint: Path) -> EngineConfig:
    """Two prefill and four decode devices, four slots, chunks of 8 rows, pages of 4 tokens, exact replay."""
    return EngineConfig(
        model=str(checkpoint), numerics="plain", max_model_len=MAX_MODEL_LEN, max_num_seqs=4, max_num_batched_tokens=16,
        page_size=4, replay_prefix="exact", replay_tail="full",
    )


@pytest.fixture(scope="session")
def engine(engine_config: EngineConfig) -> Iterator[Engine]:
    """One engine for the session; tests leave it idle."""
    with Engine(engine_config) as engine:
        yield engine
        assert engine.num_running == engine.num_waiting == 0
