"""`widemesh serve` as a process, and `widemesh generate` as its client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from widemesh.serving.config import EngineConfig
from widemesh.serving.grpc.server import GrpcServer, ServerConfig
from widemesh.tools.cli import main

FAKE_ENGINE = Path(__file__).parents[1] / "serving" / "grpc" / "fake_engine.py"

PROGRAM = """
import gc, sys, types
sys.path.insert(0, {folder!r})
from fake_engine import FakeEngine
module = types.ModuleType("widemesh.serving.engine")
module.Engine = lambda config, *_, **__: FakeEngine(config.model, max_model_len=config.max_model_len)
sys.modules["widemesh.serving.engine"] = module
from widemesh.tools.cli import main
status = main(sys.argv[1:])
print("left to garbage collections:", len(gc.get_objects()), "of", len(gc.get_objects()) + gc.get_freeze_count())
sys.exit(status)
"""


def serve(*args: str) -> subprocess.Popen:
    """`widemesh serve` with a fake engine."""
    program = PROGRAM.format(folder=str(FAKE_ENGINE.parent))
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program, "serve", *args], stdout=pipe, stderr=pipe, text=True)


def test_serve_says_where_and_ends_cleanly(byte_folder, capsys):
    process = serve(str(byte_folder), "--port", "0", "--served-model-name", "tiny")
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"serving tiny on 127\.0\.0\.1:(\d+)\n", line)
    assert found is not None, line
    assert main(["generate", "--prompt", "the sea", "--port", found[1], "--max-tokens", "3"]) == 0
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=5)
    assert process.returncode == 0
    left, all_objects = map(int, re.fullmatch(r"left to garbage collections: (\d+) of (\d+)\n", out).groups())
    assert left < 0.2 * all_objects
    assert "finish=length" in err and "the sea" not in err and "Traceback" not in err


def test_a_taken_port_is_one_sentence_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = serve("/no/such/folder", "--port", str(taken.getsockname()[1]))
        _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert re.search(r"^widemesh: port=\d+ on host=127.0.0.1 cannot be listened on", err, re.M), err
    assert "loading" not in err and "Traceback" not in err


def test_a_wrong_folder_is_one_sentence():
    process = serve("/no/such/folder", "--port", "0")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert re.search(r"^widemesh: /no/such/folder.config.json does not exist", err, re.M), err
    assert "Traceback" not in err


@pytest.fixture
def served(byte_folder, fake_engine) -> Any:
    """`served(script=...)` starts a server with a fake engine on a loop in another thread."""
    ends: list[Callable[[], None]] = []

    def start(**options: Any) -> SimpleNamespace:
        made = fake_engine(**options)
        started: SimpleNamespace = SimpleNamespace(engines=made.engines, ready=threading.Event())

        async def run() -> None:
            server = GrpcServer(ServerConfig(port=0))
            await server.start()
            await server.set_engine(made.build(EngineConfig(model=str(byte_folder))))
            started.port, started.stop, started.loop = server.port, asyncio.Event(), asyncio.get_running_loop()
            started.ready.set()
            await started.stop.wait()
            await server.stop()

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        assert started.ready.wait(5)

        def end() -> None:
            with contextlib.suppress(RuntimeError):  # the test has stopped it already
                started.loop.call_soon_threadsafe(started.stop.set)
            thread.join(5)

        ends.append(end)
        return started

    yield start
    for end in ends:
        end()


def test_generate_prints_whole_text_as_it_comes(served, byte_folder, capsys):
    from widemesh.serving.tokens import load_tokenizer

    text = "Größe 😀 世界!"
    ids = load_tokenizer(byte_folder).encode(text).ids
    server = served(script=ids)
    args = ["generate", "--prompt", "go", "--port", str(server.port), "--temperature", "0"]
    assert main([*args, "--max-tokens", str(len(ids))]) == 0
    assert capsys.readouterr().out == text + "\n"
    ((_, _, sampling),) = server.engines[0].asked
    assert sampling.is_greedy


def test_a_refusal_of_the_server_is_one_sentence(served, capsys):
    server = served()
    assert main(["generate", "--prompt", "", "--port", str(server.port)]) == 2
    assert "INVALID_ARGUMENT: text='' must not be empty" in capsys.readouterr().err


def test_a_server_that_shuts_down_is_one_sentence(served, capsys):
    server = served(delay_s=0.05)
    threading.Timer(0.3, lambda: server.loop.call_soon_threadsafe(server.stop.set)).start()
    assert main(["generate", "--prompt", "go", "--port", str(server.port)]) == 2
    assert "ended the request early (finish_reason abort)" in capsys.readouterr().err
