"""A served fake engine, over a real gRPC connection on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from widemesh.serving.grpc.server import GrpcServer, ServerConfig

HERE = Path(__file__).parent
GOLDEN = HERE.parents[1] / "golden" / "A"


def _load(name: str) -> Any:
    """A module beside this file; tests are imported without a path of their own."""
    spec = importlib.util.spec_from_file_location(f"widemesh_test_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


fake_engine = _load("fake_engine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A running server with a fake engine, and a stub connected to it."""

    engine: Any
    server: GrpcServer
    channel: grpc.aio.Channel
    stub: vllm_engine_pb2_grpc.VllmEngineStub

    async def generate(self, *, stream: bool = True, timeout: float = 5.0, **fields: Any) -> list[pb.GenerateResponse]:
        """Every message of one Generate call."""
        return [r async for r in self.stub.Generate(request(stream=stream, **fields), timeout=timeout)]

    async def until(self, condition: Callable[[], bool], seconds: float = 3.0) -> None:
        """Return once the condition holds; fail if it does not in time."""
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)


def request(
    ids: list[int] | None = None, *, text: str | None = None, request_id: str = "", stream: bool = True,
    **sampling: Any,
) -> pb.GenerateRequest:
    """A request with token ids or text, and sampling fields by name."""
    message = pb.GenerateRequest(request_id=request_id, stream=stream, sampling_params=pb.SamplingParams(**sampling))
    if text is not None:
        message.text = text
    else:
        message.tokenized.input_ids.extend([5, 6, 7] if ids is None else ids)
    return message


@contextlib.asynccontextmanager
async def serving(engine: Any) -> AsyncIterator[Served]:
    """Serve `engine` for the length of the block."""
    server = GrpcServer(ServerConfig(port=0))
    await server.start()
    try:
        await server.set_engine(engine)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            yield Served(engine=engine, server=server, channel=channel, stub=stub)
    finally:
        await server.stop()


@pytest.fixture
def make_engine() -> Callable[..., Any]:
    """Makes a fake engine: `make_engine(delay_s=..., burst=..., script=...)`."""
    return lambda folder=GOLDEN, **options: fake_engine.FakeEngine(folder, **options)


@pytest.fixture(name="serving")
def serving_fixture() -> Callable[..., Any]:
    """The async context manager `serving(engine)`, which yields a `Served`."""
    return serving


@pytest.fixture(name="request_of")
def request_fixture() -> Callable[..., pb.GenerateRequest]:
    """Builds a GenerateRequest from ids or text and sampling fields."""
    return request


@pytest.fixture
def expected_tokens() -> Callable[..., list[int]]:
    """What the fake engine answers to ids."""
    return fake_engine.expected_tokens
