"""`widemesh demo` over real gRPC with a fake engine: its table, its last line, and the embedded checkpoint."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest

from widemesh import __version__
from widemesh.tools import demo, embedded
from widemesh.tools.cli import main


def test_demo_prints_a_table_and_its_figures(byte_folder, fake_engine, monkeypatch, capsys):
    made = fake_engine(delay_s=0.002)
    monkeypatch.setattr(demo, "embedded_checkpoint", lambda: byte_folder)
    assert main(["demo", "--requests", "3", "--max-tokens", "5"]) == 0
    out = capsys.readouterr().out
    figures = json.loads(out.strip().splitlines()[-1])
    assert (figures["requests"], figures["tokens"], figures["transferred_bytes"]) == (3, 15, 4096)
    assert figures["prompt_tokens"] == sum(len(ids) for _, ids, _ in made.engines[0].asked)
    assert len(figures["first_token_s"]) == 3 and all(0 < s < 5 for s in figures["first_token_s"])
    assert all(speed > 0 for speed in figures["request_tokens_per_s"])
    assert "tokens/s" in out and "4,096 bytes moved from the prefill mesh (2 devices)" in out
    assert out.count("(length)") == 3 and out.count("first token after") == 3
    config = made.configs[0]
    assert (config.prefill_devices, config.decode_devices) == (2, 4)
    assert not made.engines[0].is_alive


def test_what_the_server_says_of_a_prompt_is_one_sentence(byte_folder, fake_engine, monkeypatch, capsys):
    made = fake_engine(delay_s=0.002, die_after=1)
    monkeypatch.setattr(demo, "embedded_checkpoint", lambda: byte_folder)
    assert main(["demo", "--requests", "3", "--max-tokens", "5"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("widemesh: ") and "UNAVAILABLE: the engine has stopped" in last
    assert not made.engines[0].is_alive


def test_output_that_has_no_room_is_one_sentence(byte_folder, fake_engine, monkeypatch, capsys):
    def fail(self, index):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fake_engine()
    monkeypatch.setattr(demo, "embedded_checkpoint", lambda: byte_folder)
    monkeypatch.setattr(demo._View, "show", fail)
    assert main(["demo", "--requests", "3", "--max-tokens", "5"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("widemesh: writing failed (No space left on device);")


def test_text_is_shown_on_one_line_without_control_characters():
    assert demo._printable("a\x1b[2J\r\n\ufffd世") == "a·[2J···世"


# --- the embedded checkpoint -------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "widemesh"


def test_it_is_made_once_even_by_several_at_once(cache, monkeypatch):
    made = []

    def write(folder, **settings):
        made.append(settings)
        time.sleep(0.05)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "write_tiny", write)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(embedded.embedded_checkpoint())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {cache / f"tiny-mesh-seed0-{__version__}"} and len(found) == 4
    assert (found[0] / "config.json").read_text() == "{}"
    assert [path.name for path in cache.iterdir()] == [found[0].name]  # nothing is left over
    count = len(made)
    embedded.embedded_checkpoint()
    assert len(made) == count and made[0] == {"preset": "tiny-mesh", "seed": 0, "form": "quantized"}


def test_an_interrupted_first_use_leaves_nothing(cache, monkeypatch):
    def write(folder, **settings):
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "write_tiny", write)
    with pytest.raises(KeyboardInterrupt):
        embedded.embedded_checkpoint()
    assert list(cache.iterdir()) == []
