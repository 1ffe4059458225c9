"""`widemesh serve` as its users meet it: a process of its own, a real model, stock gRPC clients."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from widemesh.serving.grpc.client import Client
from widemesh.serving.request import SamplingParams

SERVICE = "vllm.grpc.engine.VllmEngine"
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], list(range(30, 60)))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[str]:
    """Address of a running `widemesh serve`; ends with SIGTERM, which must end the process with 0 within 5 s."""
    # The settings of the `engine` fixture, so that programs compiled for either serve both.
    flags = ["--port", "0", "--numerics", "plain", "--max-model-len", "96", "--max-num-seqs", "4",
             "--max-num-batched-tokens", "16", "--page-size", "4", "--replay-prefix", "exact",
             "--replay-tail", "full"]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "widemesh.tools.cli", "serve", str(checkpoint), *flags],
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"serving .* on (127\.0\.0\.1:\d+)\n", line)
    assert found, line
    yield found[1]
    start_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 0
    assert time.monotonic() - start_s < 5


def generate(ids: list[int], tokens: int = 12, **fields) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=sampling, stream=True, **fields
    )


async def tokens_of(call) -> list[int]:
    return [token async for message in call for token in message.chunk.token_ids]


def test_a_stock_client_finds_and_calls_the_service(server: str) -> None:
    """By reflection alone, without this project's or the protocol's generated code."""
    with grpc.insecure_channel(server) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        pool = DescriptorPool(database)
        method = pool.FindServiceByName(SERVICE).methods_by_name["GetModelInfo"]
        call = channel.unary_unary(f"/{SERVICE}/GetModelInfo",
                                   request_serializer=lambda message: message.SerializeToString(),
                                   response_deserializer=GetMessageClass(method.output_type).FromString)  # fmt: skip
        info = call(GetMessageClass(method.input_type)(), timeout=5)
        assert (info.vocab_size, info.max_context_length, info.model_type) == (512, 96, "deepseek_v41")


def test_two_streams_at_once_give_the_same_ids_as_alone(server: str) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(server) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            alone = [await tokens_of(stub.Generate(generate(ids))) for ids in PROMPTS]
            assert [len(tokens) for tokens in alone] == [12, 12]
            both = await asyncio.gather(*(tokens_of(stub.Generate(generate(ids))) for ids in PROMPTS))
            assert both == alone

    asyncio.run(run())


def test_samples_logprobs_stops_and_grammars(server: str) -> None:
    """What the protocol asks of sampling, against the same requests one by one."""

    async def run() -> None:
        async with grpc.aio.insecure_channel(server) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)

            async def ask(stream: bool, **settings) -> list[pb.GenerateResponse]:
                sampling = pb.SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 8, "ignore_eos": True,
                                                **settings})  # fmt: skip
                request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=PROMPTS[0]),
                                             sampling_params=sampling, stream=stream)  # fmt: skip
                return [message async for message in stub.Generate(request)]

            singles = [(await ask(False, seed=3 + i, logprobs=2))[0].complete for i in range(3)]
            done = sorted((m.complete for m in await ask(False, n=3, logprobs=2)), key=lambda m: m.index)
            assert [m.index for m in done] == [0, 1, 2]
            for one, alone in zip(done, singles, strict=True):
                assert list(one.output_ids) == list(alone.output_ids)
                assert one.output_logprobs == alone.output_logprobs and len(one.output_logprobs.top_logprobs) == 8
            (scored,) = await ask(False, logprobs=2, prompt_logprobs=1)
            (first, *rest) = [m.chunk for m in await ask(True, prompt_logprobs=1) if m.HasField("chunk")]
            values = scored.complete.input_logprobs
            assert first.input_logprobs == values and not any(chunk.HasField("input_logprobs") for chunk in rest)
            assert list(values.token_ids) == list(PROMPTS[0])
            assert [one.HasField("value") for one in values.token_logprobs] == [False] + [True] * (len(PROMPTS[0]) - 1)
            assert [len(top.values) for top in values.top_logprobs] == [0] + [1] * (len(PROMPTS[0]) - 1)
            streamed = await ask(True, n=3)
            for index in range(3):
                chunks = [m.chunk for m in streamed if m.HasField("chunk") and m.chunk.index == index]
                assert [i for chunk in chunks for i in chunk.token_ids] == list(done[index].output_ids)
            assert sorted(m.complete.index for m in streamed if m.HasField("complete")) == [0, 1, 2]

            (choice,) = await ask(False, choice=pb.ChoiceConstraint(choices=["yes", "no"]), ignore_eos=False)
            assert choice.complete.finish_reason == "stop"
            (stopped,) = await ask(False, regex="a{3}b{3}", stop=["ab"])
            assert (stopped.complete.finish_reason, stopped.complete.matched_stop_str) == ("stop", "ab")

    asyncio.run(run())


def test_a_client_shows_no_stop_string(server: str) -> None:
    async def run() -> None:
        host, port = server.split(":")
        async with Client(host, int(port)) as client:
            sampling = SamplingParams(temperature=1.0, seed=1, n=2, regex="x{4}yzx{30}", stop=("yz",), logprobs=1)
            pieces = [piece async for piece in client.generate(PROMPTS[0], sampling)]
        for index in range(2):
            mine = [piece for piece in pieces if piece.index == index]
            assert "".join(piece.text for piece in mine) == "xxxx"
            assert (mine[-1].finish_reason, mine[-1].matched_stop) == ("stop", "yz")
            assert all(len(piece.logprobs) == len(piece.token_ids) == len(piece.top_logprobs) for piece in mine)

    asyncio.run(run())


def test_cancelling_one_frees_it_and_leaves_the_other(server: str) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(server) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            alone = await tokens_of(stub.Generate(generate(PROMPTS[0], 40)))
            kept = asyncio.create_task(tokens_of(stub.Generate(generate(PROMPTS[0], 40))))
            doomed = stub.Generate(generate(PROMPTS[1], 60, request_id="doomed"))
            await doomed.read()
            doomed.cancel()
            async with asyncio.timeout(5):
                while (await stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests > 1:
                    await asyncio.sleep(0.01)
            assert not kept.done()  # only the cancelled one has left
            assert await kept == alone
            again = stub.Generate(generate(PROMPTS[1], 2, request_id="doomed"))  # its id is free
            assert len(await tokens_of(again)) == 2

    asyncio.run(run())


def test_generate_prints_text_as_it_comes(server: str) -> None:
    host, port = server.split(":")
    command = [sys.executable, "-m", "widemesh.tools.cli", "generate", "--prompt", "a prompt", "--host", host,
               "--port", port, "--temperature", "0", "--max-tokens", "8"]  # fmt: skip
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr


def test_bad_requests_leave_the_server_alive(server: str) -> None:
    async def refused(call) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        return caught.value.code(), caught.value.details() or ""

    async def run() -> None:
        async with grpc.aio.insecure_channel(server) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            invalid = grpc.StatusCode.INVALID_ARGUMENT
            for ids, words in (([], "empty"), ([600], "vocabulary"), ([510], "image"), ([5] * 96, "max_model_len")):
                code, detail = await refused(stub.Generate(generate(ids)))
                assert (code, words in detail) == (invalid, True), detail
            assert len(await tokens_of(stub.Generate(generate([5, 6], 2)))) == 2

    asyncio.run(run())
