"""The service over a real connection: transcripts, cancellation at every moment, errors, facts."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from widemesh.serving.grpc import tokenizer_bundle


async def refused(call):
    """The status of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def rest_of(call):
    """The messages that follow those already read."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


# --- transcripts -------------------------------------------------------------------------------------------------


def test_streaming_sends_deltas_then_one_complete(make_engine, serving, expected_tokens):
    async def main():
        async with serving(make_engine(burst=2)) as served:
            return await served.generate(ids=[5, 6, 7], max_tokens=5)

    messages = asyncio.run(main())
    assert [m.WhichOneof("response") for m in messages] == ["chunk", "chunk", "chunk", "complete"]
    want = expected_tokens([5, 6, 7], 5, 160)
    assert [list(m.chunk.token_ids) for m in messages[:-1]] == [want[:2], want[2:4], want[4:]]
    assert [m.chunk.completion_tokens for m in messages[:-1]] == [2, 2, 1]
    assert all(m.chunk.prompt_tokens == 3 for m in messages[:-1])
    done = messages[-1].complete
    assert (list(done.output_ids), done.finish_reason, done.completion_tokens, done.prompt_tokens) == (
        want[4:], "length", 5, 3)


def test_without_streaming_one_complete_has_everything(make_engine, serving, expected_tokens):
    async def main():
        async with serving(make_engine(burst=2)) as served:
            return await served.generate(ids=[5, 6, 7], stream=False, max_tokens=5)

    (message,) = asyncio.run(main())
    done = message.complete
    assert list(done.output_ids) == expected_tokens([5, 6, 7], 5, 160)
    assert (done.finish_reason, done.completion_tokens, done.prompt_tokens) == ("length", 5, 3)


def test_a_stop_token_is_reported(make_engine, serving):
    async def main():
        async with serving(make_engine()) as served:
            return await served.generate(ids=[5, 6, 7], stream=False, stop_token_ids=[20])

    done = asyncio.run(main())[0].complete
    assert (list(done.output_ids), done.finish_reason, done.matched_token_id) == ([18, 19, 20], "stop", 20)


def test_text_is_encoded_and_sampling_arrives(make_engine, serving):
    async def main():
        async with serving(make_engine()) as served:
            await served.generate(text="the", request_id="mine", max_tokens=1, temperature=0.0, seed=4)
            return served.engine.asked

    ((request_id, ids, sampling),) = asyncio.run(main())
    assert (request_id, ids) == ("mine", [3])
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (1, 0.0, 4)


def test_two_streams_at_once_give_what_each_gives_alone(make_engine, serving, expected_tokens):
    async def main():
        async with serving(make_engine(delay_s=0.002)) as served:
            return await asyncio.gather(served.generate(ids=[1], max_tokens=8), served.generate(ids=[70], max_tokens=8))

    for messages, ids in zip(asyncio.run(main()), ([1], [70]), strict=True):
        assert [i for m in messages for i in m.chunk.token_ids] == expected_tokens(ids, 8, 160)


def test_an_empty_id_gets_a_fresh_one_and_one_in_flight_is_refused(make_engine, serving, request_of):
    async def main():
        async with serving(make_engine(delay_s=0.01)) as served:
            both = await asyncio.gather(served.generate(max_tokens=1), served.generate(max_tokens=1))
            assert len({request_id for request_id, _, _ in served.engine.asked}) == 2
            first = served.stub.Generate(request_of(request_id="twin"))
            await first.read()
            status = await refused(served.generate(request_id="twin", max_tokens=1))
            assert (await first.read()).chunk.token_ids  # the first one is not disturbed
            first.cancel()
            await served.until(lambda: served.engine.num_running == 0)
            again = await served.generate(request_id="twin", max_tokens=1)  # free once it has ended
            return both, status, again

    both, (code, details), again = asyncio.run(main())
    assert all(messages[-1].complete.finish_reason == "length" for messages in [*both, again])
    assert code is grpc.StatusCode.ALREADY_EXISTS and "request_id='twin'" in details


def test_an_engine_that_stops_meanwhile_is_unavailable(make_engine, serving):
    async def main():
        async with serving(make_engine(die_after=0)) as served:
            return await refused(served.generate(max_tokens=1))

    code, details = asyncio.run(main())
    assert code is grpc.StatusCode.UNAVAILABLE and details.startswith("the engine has stopped; see the server's log")


def test_a_long_refusal_travels_in_any_script(make_engine, serving):
    """Every byte of it becomes three in the header that carries it, whose size is limited."""
    name = "\U0001f30a" * 2000

    async def main():
        async with serving(make_engine(delay_s=30)) as served:
            first = asyncio.create_task(served.generate(request_id=name))
            await served.until(lambda: served.engine.num_running == 1)
            status = await refused(served.generate(request_id=name))
            first.cancel()
            return status

    code, details = asyncio.run(main())
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert details.startswith("request_id='\U0001f30a") and len(details.encode()) <= 1000


# --- ends before the end -----------------------------------------------------------------------------------------


def test_cancelling_before_the_first_token_frees_the_request(make_engine, serving, request_of):
    async def main():
        async with serving(make_engine(delay_s=30)) as served:
            call = served.stub.Generate(request_of(request_id="early"))
            await served.until(lambda: served.engine.num_running == 1)
            call.cancel()
            await served.until(lambda: served.engine.num_running == 0)
            return served.engine.ended

    assert asyncio.run(main()) == {"early": "closed"}


def test_cancelling_in_the_middle_frees_it_and_disturbs_no_other(make_engine, serving, request_of, expected_tokens):
    async def main():
        async with serving(make_engine(delay_s=0.005)) as served:
            other = asyncio.create_task(served.generate(ids=[9], request_id="other", max_tokens=40))
            call = served.stub.Generate(request_of(request_id="mid"))
            for _ in range(3):
                await call.read()
            call.cancel()
            await served.until(lambda: "mid" in served.engine.ended)
            call.cancel()  # twice is harmless
            return await other, served.engine.ended

    messages, ended = asyncio.run(main())
    assert ended == {"mid": "closed", "other": "length"}
    assert [i for m in messages for i in m.chunk.token_ids] == expected_tokens([9], 40, 160)


def test_a_client_that_reads_nothing_and_leaves_frees_the_request(make_engine, serving, request_of):
    async def main():
        async with serving(make_engine(burst=1, max_model_len=10**6)) as served:
            call = served.stub.Generate(request_of(request_id="lazy"))
            await served.until(lambda: served.engine.num_running == 1)
            await asyncio.sleep(0.05)
            call.cancel()
            await served.until(lambda: served.engine.num_running == 0)
            return served.engine.ended

    assert asyncio.run(main()) == {"lazy": "closed"}


def test_a_deadline_ends_the_request(make_engine, serving):
    async def main():
        async with serving(make_engine(delay_s=0.01)) as served:
            start = time.monotonic()
            status = await refused(served.generate(request_id="late", timeout=0.05))
            await served.until(lambda: served.engine.num_running == 0)
            return status[0], served.engine.ended, time.monotonic() - start

    code, ended, seconds = asyncio.run(main())
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert ended == {"late": "closed"} and seconds < 1


def test_abort_ends_the_stream_with_abort(make_engine, serving, request_of):
    async def main():
        async with serving(make_engine(delay_s=0.01)) as served:
            call = served.stub.Generate(request_of(request_id="mid"))
            await call.read()
            await served.stub.Abort(pb.AbortRequest(request_ids=["mid", "unknown", ""]))
            await served.stub.Abort(pb.AbortRequest(request_ids=["mid"]))
            rest = await rest_of(call)
            await served.stub.Abort(pb.AbortRequest(request_ids=["mid"]))  # after the end
            after = await served.generate(request_id="next", max_tokens=1)
            return rest, after, served.engine

    rest, after, engine = asyncio.run(main())
    assert rest[-1].complete.finish_reason == "abort" and not rest[-1].complete.output_ids
    assert after[-1].complete.finish_reason == "length"
    assert engine.ended == {"mid": "abort", "next": "length"}
    assert "" not in engine.aborts


def test_abort_reaches_a_request_that_is_still_being_encoded(make_engine, serving, request_of, monkeypatch):
    from widemesh.serving.grpc import servicer

    encode = servicer.encode_prompt

    def slowly(*args):
        time.sleep(0.2)
        return encode(*args)

    monkeypatch.setattr(servicer, "encode_prompt", slowly)

    async def main():
        async with serving(make_engine()) as served:
            call = served.stub.Generate(request_of(text="the", request_id="slow"))
            quick = await served.generate(ids=[1], max_tokens=1)  # encoding does not hold up the others
            await asyncio.sleep(0.05)
            assert not served.engine.ended.get("slow")
            await served.stub.Abort(pb.AbortRequest(request_ids=["slow"]))
            return quick, [m async for m in call], [request_id for request_id, _, _ in served.engine.asked]

    quick, messages, asked = asyncio.run(main())
    assert quick[-1].complete.finish_reason == "length"
    assert [m.complete.finish_reason for m in messages] == ["abort"]
    assert "slow" not in asked


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"ids": []}, "INVALID_ARGUMENT", "input_ids=[] must not be empty"),
        ({"text": ""}, "INVALID_ARGUMENT", "text='' must not be empty"),
        ({"ids": [160]}, "INVALID_ARGUMENT", "input_ids=160 must be below the vocabulary size 160"),
        ({"ids": [1] * 64}, "INVALID_ARGUMENT", "prompt=64 tokens are too many"),
        ({"temperature": -1.0}, "INVALID_ARGUMENT", "temperature=-1.0 must be between 0 and 100"),
        ({"n": 200}, "INVALID_ARGUMENT", "n=200 must be from 1 to 128"),
        ({"prompt_logprobs": 21}, "INVALID_ARGUMENT", "prompt_logprobs=21 must be from 0 to 20"),
        ({"structural_tag": "{}"}, "UNIMPLEMENTED", "structural_tag='{}' is not supported yet"),
    ],
)
def test_bad_requests_get_a_code_and_a_sentence_and_the_server_lives(make_engine, serving, fields, code, words):
    async def main():
        async with serving(make_engine()) as served:
            status = await refused(served.generate(**fields))
            return status, await served.generate(max_tokens=1)

    (got, details), after = asyncio.run(main())
    assert (got.name, words in details) == (code, True), details
    assert after[-1].complete.finish_reason == "length"


def test_a_defect_is_internal_and_the_server_lives(make_engine, serving, caplog):
    async def main():
        async with serving(make_engine(fail_after=2)) as served:
            status = await refused(served.generate(request_id="doomed", max_tokens=5))
            return status, await served.generate(max_tokens=2)

    (code, details), after = asyncio.run(main())
    assert code is grpc.StatusCode.INTERNAL
    assert "RuntimeError: the device is on fire" in details and "second line" not in details
    assert after[-1].complete.finish_reason == "length"
    assert any(record.exc_info for record in caplog.records if record.name == "widemesh.serving.grpc.servicer")


def test_an_oversize_message_is_refused_and_the_server_lives(make_engine, serving):
    async def main():
        async with serving(make_engine()) as served:
            options = [("grpc.max_send_message_length", -1)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{served.server.port}", options=options) as channel:
                call = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
                status = await refused(call(bytes(64 * 1024 * 1024 + 1)).read())
            return status[0], await served.generate(max_tokens=1)

    code, after = asyncio.run(main())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert after[-1].complete.finish_reason == "length"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Embed", pb.EmbedRequest()),
        ("GetLoads", pb.GetLoadsRequest()),
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest()),
    ],
)
def test_calls_not_offered_say_so(make_engine, serving, name, message):
    async def main():
        async with serving(make_engine()) as served:
            call = getattr(served.stub, name)(message)
            return await refused(call.read() if name == "SubscribeKvEvents" else call)

    code, details = asyncio.run(main())
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert details.startswith(f"{name} is not supported yet; ")


# --- facts -------------------------------------------------------------------------------------------------------


def test_model_and_server_info(make_engine, serving, request_of):
    async def main():
        async with serving(make_engine(served_model_name="tiny", delay_s=0.01)) as served:
            call = served.stub.Generate(request_of())
            await call.read()
            model = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
            server = await served.stub.GetServerInfo(pb.GetServerInfoRequest())
            health = await served.stub.HealthCheck(pb.HealthCheckRequest())
            return served.engine, model, server, health

    engine, model, server, health = asyncio.run(main())
    assert (model.model_path, model.tokenizer_path, model.served_model_name) == (*[engine.config.model] * 2, "tiny")
    assert (model.is_generation, model.supports_vision, model.vocab_size) == (True, False, 160)
    assert (model.max_context_length, model.max_req_input_len) == (64, 63)
    assert (model.model_type, list(model.architectures)) == ("deepseek_v41", ["DeepseekV41ForCausalLM"])
    assert (model.bos_token_id, list(model.eos_token_ids), model.pad_token_id) == (0, [1], 2)
    assert (server.active_requests, server.max_num_seqs, server.data_parallel_size) == (1, 4, 1)
    assert server.server_type == "vllm-grpc" and server.uptime_seconds > 0
    assert abs(server.last_receive_timestamp - time.time()) < 5
    assert (health.healthy, health.message) == (True, "ready")


def test_the_tokenizer_arrives_whole_in_chunks(make_engine, serving, monkeypatch):
    monkeypatch.setattr(tokenizer_bundle, "CHUNK_BYTES", 700)

    async def main():
        async with serving(make_engine()) as served:
            chunks = [c async for c in served.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
            return served.engine, chunks

    engine, chunks = asyncio.run(main())
    assert len(chunks) > 2
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    bundle = b"".join(chunk.data for chunk in chunks)
    tokenizer = tokenizer_bundle.unpack(bundle, chunks[-1].sha256)
    assert tokenizer.get_vocab() == engine.tokenizer.get_vocab()


def test_every_request_leaves_one_log_line_without_its_text(make_engine, serving, request_of, caplog):
    caplog.set_level(logging.INFO, "widemesh.requests")

    async def main():
        async with serving(make_engine(delay_s=0.005)) as served:
            await served.generate(text="the", request_id="good\nforged", max_tokens=2)
            await refused(served.generate(text="the", request_id="bad", structural_tag="{}"))
            call = served.stub.Generate(request_of(request_id="gone"))
            await call.read()
            call.cancel()
            await served.until(lambda: len(lines()) == 3)

    def lines():
        return [record.getMessage() for record in caplog.records if record.name == "widemesh.requests"]

    asyncio.run(main())
    good, bad, gone = lines()
    assert "id='good\\nforged' prompt_tokens=1 completion_tokens=2 cached_tokens=0" in good and "finish=length" in good
    assert "ttft_ms=-" not in good and "accept_ms=-" not in good
    assert "id='bad' prompt_tokens=0" in bad and "ttft_ms=- " in bad and "finish=refused:UNIMPLEMENTED" in bad
    assert "id='gone'" in gone and "finish=cancelled" in gone
    assert not any("the" in line.replace("other", "") for line in lines())


@pytest.mark.parametrize(("metadata", "priority"), [((), 0), ((("x-priority", "-3"),), -3), ((("x-other", "9"),), 0)])
def test_priority_comes_from_the_metadata(make_engine, serving, request_of, metadata, priority):
    fake = make_engine()

    async def run():
        async with serving(fake) as served:
            async for _ in served.stub.Generate(request_of(), metadata=metadata):
                pass

    asyncio.run(run())
    assert fake.priorities == [priority]


def test_a_priority_that_is_no_number_is_refused(make_engine, serving, request_of):
    async def run():
        async with serving(make_engine()) as served:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in served.stub.Generate(request_of(), metadata=(("x-priority", "high"),)):
                    pass
        return caught.value

    err = asyncio.run(run())
    assert err.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert err.details() == "x-priority='high' must be a whole number; lower goes first, 0 is usual"
