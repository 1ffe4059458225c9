"""A small checkpoint, and jobs of real `widemesh serve` processes over it that meet on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from widemesh.model.checkpoint import write_checkpoint
from widemesh.model.presets import TINY_MESH
from widemesh.model.random_weights import random_tensors
from widemesh.model.tiny_tokenizer import tiny_tokenizer
from widemesh.sharding.ticket.addresses import free_port

# A window layer with Engram and one that stores keys: few layers, since each process compiles them.
MODEL = dataclasses.replace(
    TINY_MESH, num_hidden_layers=2, compress_ratios=(0, 1), kv_source_layer_ids=(1,), index_source_layer_ids=(1,),
    candidate_source_layer_id=1, engram_layer_ids=(0,), engram_num_embeddings=(1618,), num_nextn_predict_layers=0,
    dspark_target_layer_ids=(),
)  # fmt: skip
SETTINGS = {
    "numerics": "plain", "max_model_len": 48, "max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 4,
    "replay_prefix": "exact", "replay_tail": "full", "prefill_devices": 2, "decode_devices": 2,
}  # fmt: skip
START_S = 240  # for a job to be ready on a loaded machine, with nothing in the cache of programs

# Programs of CPU processes differ in their names in the cache, and JAX lets process 0 alone store them. This lets all,
# so that only the first job of a test run compiles.
SERVE = """
import sys, types
import jax._src.compiler as compiler
everybody = types.SimpleNamespace(process_id=0, client=None)
compiler.distributed = types.SimpleNamespace(global_state=everybody)
from widemesh.tools.cli import main
sys.exit(main(["serve", *sys.argv[1:]]))
"""


class Served:
    """One `widemesh serve` process. What it logs is in `log()`; `port` is set once it serves."""

    def __init__(self, folder: Path, log_file: Path, settings: Mapping[str, object]):
        own = dict(settings)
        folder = own.pop("model", folder)  # type: ignore[assignment]
        flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in own.items()]
        devices = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
        self.port = 0
        self._log_file = log_file
        with log_file.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(folder), "--port=0", *flags], stdout=subprocess.PIPE, stderr=log,
                text=True, env={**os.environ, "XLA_FLAGS": devices, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        self.is_ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # gloo writes there too
            if found := re.match(r"serving .*:(\d+)$", line):
                self.port = int(found[1])
                self.is_ready.set()

    def log(self) -> str:
        """What it has written to standard error."""
        return self._log_file.read_text()

    def exit_status(self, timeout_s: float) -> int:
        """With which it ends within that time."""
        return self.process.wait(timeout_s)

    def cpu_s(self) -> float:
        """Processor time that it has taken so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


StartJob = Callable[..., list[Served]]


@contextlib.contextmanager
def running(
    folder: Path, logs: Path, each: Sequence[Mapping[str, object]], *, awaits: bool = True
) -> Iterator[list[Served]]:
    """A job of one process for each entry of `each`, which holds settings of its own. All are killed at the end."""
    coordinator = f"127.0.0.1:{free_port()}"
    served = []
    try:
        for i, own in enumerate(each):
            place = {"coordinator": coordinator, "num_processes": len(each), "process_id": i}
            served.append(Served(folder, logs / f"rank{i}.log", SETTINGS | place | own))
        deadline_s = time.monotonic() + START_S
        while awaits and not all(one.is_ready.is_set() for one in served):
            ended = [one for one in served if one.process.poll() is not None]
            assert not ended and time.monotonic() < deadline_s, "\n\n".join(one.log()[-3000:] for one in served)
            time.sleep(0.05)
        yield served
    finally:
        for one in served:
            with contextlib.suppress(ProcessLookupError):
                one.process.send_signal(signal.SIGCONT)
                one.process.kill()
            one.process.wait(10)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of MODEL."""
    path = tmp_path_factory.mktemp("processes") / "model"
    return write_model(path, seed=0)


@pytest.fixture(scope="session", name="write_model")
def write_model_fixture() -> Callable[..., Path]:
    """`write_model(path, seed)`."""
    return write_model


def write_model(path: Path, seed: int) -> Path:
    """A checkpoint with other weights for every seed."""
    tokenizer, tokenizer_config = tiny_tokenizer(MODEL)
    path.mkdir(parents=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    write_checkpoint(path, MODEL, random_tensors(MODEL, seed), form="quantized")
    return path


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[StartJob]:
    """`start({...}, {...})`: a job with settings of each process's own; `awaits=False`: it will not come to serve."""
    with contextlib.ExitStack() as stack:
        yield lambda *each, folder=folder, awaits=True: stack.enter_context(
            running(folder, tmp_path, each, awaits=awaits)
        )


@pytest.fixture(scope="session")
def run_job(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`with run_job({...}, {...}) as served`: a job with settings of each process's own."""
    return lambda *each: running(folder, tmp_path_factory.mktemp("job"), each)


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    """Of every job, but for what is a process's own."""
    return dict(SETTINGS)


@pytest.fixture(scope="session")
def prompts() -> list[np.ndarray]:
    """Of lengths from 1 on, no two of one length."""
    rng = np.random.default_rng(5)
    return [rng.integers(3, 500, length).astype(np.int32) for length in (1, 20, 5, 17, 9, 26, 3, 13)]


@pytest.fixture
def new_port() -> Callable[[], int]:
    """Gives a port that nobody listens on."""
    return free_port


@pytest.fixture(scope="session")
def ask() -> Callable[..., Iterator[pb.GenerateResponse]]:
    """`ask(port, ids, **sampling)`: the messages of a streamed request, greedy unless told otherwise."""

    def ask(port: int, ids: Sequence[int], **sampling: object) -> Iterator[pb.GenerateResponse]:
        settings: dict[str, object] = {"temperature": 0.0, "ignore_eos": True} | sampling
        request = pb.GenerateRequest(stream=True, sampling_params=pb.SamplingParams(**settings))  # type: ignore[arg-type]
        request.tokenized.input_ids.extend(ids)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield from vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request, timeout=120)

    return ask
