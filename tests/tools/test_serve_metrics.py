"""`widemesh serve --metrics-port`: a page beside the service, there before the model is."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from widemesh.model.config import ConfigError
from widemesh.tools.serve import Serve

FAKE_ENGINE = Path(__file__).parents[1] / "serving" / "grpc" / "fake_engine.py"

PROGRAM = """
import sys, types
sys.path.insert(0, {folder!r})
from fake_engine import FakeEngine
module = types.ModuleType("widemesh.serving.engine")
module.Engine = lambda config, *_, **__: FakeEngine(config.model, max_model_len=config.max_model_len)
sys.modules["widemesh.serving.engine"] = module
from widemesh.tools.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen]]:
    """The processes that a test starts."""
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def serve(started: list[subprocess.Popen], *args: str) -> subprocess.Popen:
    program = PROGRAM.format(folder=str(FAKE_ENGINE.parent))
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program, "serve", *args]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    started.append(process)
    return process


def test_the_page_shows_the_engine(byte_folder: Path, started: list[subprocess.Popen]) -> None:
    process = serve(started, str(byte_folder), "--port", "0", "--metrics-port", "0")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("serving ")
    lines = iter(process.stderr.readline, "")
    found = next(match for line in lines if (match := re.search(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", line)))
    with urllib.request.urlopen(found[1], timeout=5) as answer:
        assert "\nfake:requests_total 0.0\n" in answer.read().decode()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 0 and "Traceback" not in err


def test_a_taken_port_is_one_sentence_before_anything_is_loaded(started: list[subprocess.Popen]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = serve(started, "/no/such/folder", "--port", "0", "--metrics-port", port)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert re.search(rf"^widemesh: metrics_port={port} on host=127.0.0.1 cannot be listened on", err, re.M), err
    assert "loading" not in err and "Traceback" not in err


def test_the_port_may_stand_in_the_file(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("metrics-port: 9191\n")
    assert Serve.parse("widemesh serve", ["/there", "--config", str(settings)]).metrics.metrics_port == 9191
    assert Serve.parse("widemesh serve", ["/there"]).metrics.metrics_port is None
    with pytest.raises(ConfigError, match="metrics_port=70000 must be between 0 and 65535"):
        Serve.parse("widemesh serve", ["/there", "--metrics-port", "70000"])
