"""The client: text in whole characters, a checked tokenizer, errors in one sentence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path

import grpc
import pytest

from widemesh.model.presets import PRESETS
from widemesh.model.tiny_tokenizer import tiny_tokenizer
from widemesh.serving.grpc import tokenizer_bundle
from widemesh.serving.grpc.client import Client, ServerError
from widemesh.serving.request import SamplingParams

TEXT = "sea 😀 世界"


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory) -> Path:
    """A folder with a byte-level tokenizer and its config.json, without weights."""
    folder = tmp_path_factory.mktemp("bytes")
    config = PRESETS["tiny-mesh"]
    tokenizer, tokenizer_config = tiny_tokenizer(config)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    return folder


@pytest.mark.parametrize("burst", [1, 3])
def test_text_comes_in_whole_characters(make_engine, serving, byte_folder, burst):
    ids = tiny_tokenizer(PRESETS["tiny-mesh"])[0].encode(TEXT).ids

    async def main():
        engine, sampling = make_engine(byte_folder, script=ids, burst=burst), SamplingParams(max_tokens=len(ids))
        async with serving(engine) as served, Client(port=served.server.port) as client:
            return [piece async for piece in client.generate("go", sampling)], engine.asked

    pieces, ((_, asked, sampling),) = asyncio.run(main())
    assert "".join(piece.text for piece in pieces) == TEXT
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert [i for piece in pieces for i in piece.token_ids] == ids
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
    assert asked[0] == 0 and sampling.max_tokens == len(ids)  # BOS, which the folder asks for


def test_an_answer_cut_inside_a_character_shows_what_is_whole(make_engine, serving, byte_folder):
    ids = tiny_tokenizer(PRESETS["tiny-mesh"])[0].encode("ab😀").ids

    async def main():
        async with serving(make_engine(byte_folder, script=ids)) as served, Client(port=served.server.port) as client:
            return [p.text async for p in client.generate([5], SamplingParams(max_tokens=len(ids) - 1))]

    assert "".join(asyncio.run(main())) == "ab"


def test_the_text_of_a_stop_token_is_not_shown(make_engine, serving, byte_folder):
    ids = tiny_tokenizer(PRESETS["tiny-mesh"])[0].encode("ab!").ids

    async def main():
        async with serving(make_engine(byte_folder, script=ids)) as served, Client(port=served.server.port) as client:
            return [piece async for piece in client.generate([5], SamplingParams(stop_token_ids=(ids[-1],)))]

    pieces = asyncio.run(main())
    assert "".join(piece.text for piece in pieces) == "ab"
    assert [i for piece in pieces for i in piece.token_ids] == ids
    assert pieces[-1].finish_reason == "stop"


def test_leaving_early_cancels_on_the_server(make_engine, serving):
    async def main():
        async with serving(make_engine(delay_s=0.01)) as served, Client(port=served.server.port) as client:
            async with contextlib.aclosing(client.generate([5], request_id="r")) as pieces:
                async for _ in pieces:
                    break
            await served.until(lambda: served.engine.num_running == 0)
            return served.engine.ended

    assert asyncio.run(main()) == {"r": "closed"}


def test_abort_by_id(make_engine, serving):
    async def main():
        async with serving(make_engine(delay_s=0.01)) as served, Client(port=served.server.port) as client:
            reasons = []
            async for piece in client.generate([5], request_id="r"):
                reasons.append(piece.finish_reason)
                await client.abort("r", "unknown")
            return reasons

    assert asyncio.run(main())[-1] == "abort"


def test_no_server_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    async def main():
        async with Client(port=port) as client:
            async for _ in client.generate("hi"):
                pass

    with pytest.raises(ServerError, match=rf"^no server answers at 127.0.0.1:{port}; start one with"):
        asyncio.run(main())


def test_a_refusal_keeps_code_and_sentence(make_engine, serving):
    async def main():
        async with serving(make_engine()) as served, Client(port=served.server.port) as client:
            async for _ in client.generate([400]):
                pass

    with pytest.raises(ServerError, match="INVALID_ARGUMENT: input_ids=400 must be below") as caught:
        asyncio.run(main())
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_tokenizer_that_did_not_arrive_whole_is_refused(make_engine, serving, monkeypatch):
    cut = tokenizer_bundle.cut
    monkeypatch.setattr(tokenizer_bundle, "cut", lambda bundle: (c for c in [*cut(bundle + b"x")][-1:]))
    monkeypatch.setattr(tokenizer_bundle, "CHUNK_BYTES", 100)

    async def main():
        async with serving(make_engine()) as served, Client(port=served.server.port) as client:
            await client.fetch_tokenizer()

    with pytest.raises(ServerError, match="did not arrive whole"):
        asyncio.run(main())


def test_the_bundle_is_reproducible_flat_and_without_weights(tmp_path, byte_folder):
    import io
    import zipfile

    for path in byte_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    bundle = tokenizer_bundle.pack(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    assert tokenizer_bundle.pack(tmp_path) == bundle
    names = zipfile.ZipFile(io.BytesIO(bundle)).namelist()
    assert sorted(names) == ["chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json"]
