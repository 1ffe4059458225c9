"""The server as others see it: reflection, health through its life, ports, and its end."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from widemesh.model.config import ConfigError
from widemesh.serving.grpc import server as server_module
from widemesh.serving.grpc.server import GrpcServer, ServerConfig

SERVICE = "vllm.grpc.engine.VllmEngine"
HERE = Path(__file__).parent
GOLDEN = HERE.parents[1] / "golden" / "A"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(channel, service=SERVICE):
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


def test_reflection_lists_the_services_and_describes_generate(make_engine, serving):
    def look(port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            service = DescriptorPool(database).FindServiceByName(SERVICE)
            return set(database.get_services()), service.methods_by_name["Generate"]

    async def main():
        async with serving(make_engine()) as served:
            return await asyncio.to_thread(look, served.server.port)

    services, generate = asyncio.run(main())
    assert services == {SERVICE, "widemesh.v1.Experts", "grpc.health.v1.Health",
                        "grpc.reflection.v1alpha.ServerReflection"}  # fmt: skip
    assert [field.name for field in generate.input_type.fields][:2] == ["request_id", "tokenized"]


def test_health_follows_loading_serving_and_the_end(make_engine):
    async def main():
        server = GrpcServer(ServerConfig(port=0))
        await server.start()
        engine = make_engine(delay_s=0.01)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == NOT_SERVING
            assert await health_of(channel, "") == SERVING
            early = await stub.HealthCheck(pb.HealthCheckRequest())
            with pytest.raises(grpc.aio.AioRpcError, match="still loading"):
                await stub.GetModelInfo(pb.GetModelInfoRequest())

            await server.set_engine(engine)
            assert (await watch.read()).status == SERVING
            call = stub.Generate(pb.GenerateRequest(request_id="r", text="the", stream=True))
            assert (await call.read()).chunk.token_ids
            start = time.monotonic()
            stopping = asyncio.create_task(server.stop())
            assert (await watch.read()).status == NOT_SERVING
            rest = [await call.read()]
            while (message := await call.read()) is not grpc.aio.EOF:
                rest.append(message)
            await stopping
            return early, rest, engine, time.monotonic() - start

    early, rest, engine, seconds = asyncio.run(main())
    assert not early.healthy and "still loading" in early.message
    assert rest[-1].complete.finish_reason == "abort"
    assert engine.ended == {"r": "abort"} and not engine.is_alive
    assert seconds < 2  # the open watch does not hold the end up


def test_an_engine_that_stops_is_seen(make_engine, serving, monkeypatch):
    monkeypatch.setattr("widemesh.serving.grpc.server.ALIVE_CHECK_S", 0.01)

    async def main():
        async with serving(make_engine()) as served:
            served.engine.is_alive = False
            await asyncio.sleep(0.1)
            with pytest.raises(grpc.aio.AioRpcError, match="the engine has stopped"):
                await served.generate()
            health = await served.stub.HealthCheck(pb.HealthCheckRequest())
            return await health_of(served.channel), await health_of(served.channel, ""), health.healthy

    assert asyncio.run(main()) == (NOT_SERVING, NOT_SERVING, False)


def test_requests_are_refused_while_the_server_ends(make_engine):
    async def main():
        server = GrpcServer(ServerConfig(port=0))
        await server.start()
        engine = make_engine(delay_s=0.01)
        await server.set_engine(engine)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            server._service.close()
            with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
                await stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read()
            await server.stop()
            return caught.value.code()

    assert asyncio.run(main()) is grpc.StatusCode.UNAVAILABLE


def test_a_taken_port_is_one_clear_error():
    async def main(port):
        await GrpcServer(ServerConfig(port=port)).start()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^port={port} on host=127.0.0.1 cannot be listened on .*--port"):
            asyncio.run(main(port))


def test_two_servers_do_not_share_a_port(make_engine, serving):
    async def main():
        async with serving(make_engine()) as served:
            with pytest.raises(ConfigError, match="cannot be listened on"):
                await GrpcServer(ServerConfig(port=served.server.port)).start()

    asyncio.run(main())


def test_an_unknown_host_is_one_clear_error():
    async def main():
        await GrpcServer(ServerConfig(host="nowhere.invalid")).start()

    with pytest.raises(ConfigError, match=r"host=nowhere\.invalid cannot be listened on"):
        asyncio.run(main())


@pytest.mark.parametrize(("fields", "words"), [({"port": 70000}, "port=70000"), ({"host": ""}, "host=''")])
def test_absurd_settings_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**fields)


# --- a process of its own ----------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
sys.path.insert(0, {here!r})
from fake_engine import FakeEngine
from widemesh.serving.grpc import server
from widemesh.serving.grpc.server import ServerConfig, serve

def make_engine(on_join):
    print("loading", flush=True)
    time.sleep({load_s})
    engine = FakeEngine({folder!r}, delay_s=0.01)
    {hang}
    return engine

serve(make_engine, ServerConfig(port=0), on_ready=lambda port: print(port, flush=True))
print("done", flush=True)
"""


def start(load_s: float = 0.0, hang: str = "") -> subprocess.Popen:
    program = textwrap.dedent(PROGRAM).format(here=str(HERE), folder=str(GOLDEN), load_s=load_s, hang=hang)
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "loading\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_with_abort_and_the_process_with_zero(number):
    process = start()
    port = int(process.stdout.readline())

    async def main():
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            call = stub.Generate(pb.GenerateRequest(text="the", stream=True))
            messages = [await call.read()]
            process.send_signal(number)
            while (message := await call.read()) is not grpc.aio.EOF:
                messages.append(message)
            return messages

    messages = asyncio.run(main())
    start_s = time.monotonic()
    out, err = process.communicate(timeout=5)
    assert messages[-1].complete.finish_reason == "abort"
    assert (process.returncode, out, "Traceback" in err) == (0, "done\n", False), err
    assert time.monotonic() - start_s < 5


def test_a_signal_while_loading_ends_the_process():
    process = start(load_s=60)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=5)
    assert (process.returncode, err) == (0, "")


def test_a_hanging_engine_does_not_hold_the_process_past_five_seconds():
    assert server_module.EXIT_S < 5
    process = start(hang="engine.close = lambda: time.sleep(60); server.EXIT_S = 0.5")
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode == 0
