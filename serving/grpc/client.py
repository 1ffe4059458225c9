"""A small asynchronous client of the service: text or ids out, text as it comes back."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Self

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from widemesh.serving.grpc import tokenizer_bundle
from widemesh.serving.grpc.convert import write_sampling
from widemesh.serving.request import SamplingParams
from widemesh.serving.stop_strings import StopText

MAX_BUNDLE_BYTES = 256 * 1024 * 1024


class ServerError(RuntimeError):
    """The server could not be reached, or refused or failed a call. The message is one sentence."""

    def __init__(self, message: str, code: grpc.StatusCode | None = None):
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What arrived at one time. The last piece of a sample has a finish_reason; its text may be empty."""

    text: str  # whole characters only, and nothing that may still become a stop string
    token_ids: tuple[int, ...] = ()
    index: int = 0  # which of the request's samples
    logprobs: tuple[float, ...] = ()  # of token_ids, if asked for
    top_logprobs: tuple[dict[int, float], ...] = ()  # per token the most likely ones, best first, if asked for
    prompt_logprobs: tuple[float, ...] = ()  # of prompt tokens 1, 2, ..., in sample 0's first piece, if asked for
    prompt_top_logprobs: tuple[dict[int, float], ...] = ()  # likewise
    finish_reason: str | None = None
    matched_stop: str | None = None  # the stop string that ended it
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Client:
    """One connection to a server; use it as an async context manager on one event loop."""

    def __init__(self, host: str = "127.0.0.1", port: int = 50051):
        self._address = address_of(host, port)
        self._channel = grpc.aio.insecure_channel(self._address, options=channel_options(host))
        self._stub = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)
        self._tokenizer: Tokenizer | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()

    async def fetch_tokenizer(self) -> Tokenizer:
        """The server's tokenizer, fetched once and checked. Raises ServerError."""
        if self._tokenizer is None:
            bundle, sha256 = bytearray(), ""
            try:
                async for chunk in self._stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=60):
                    bundle += chunk.data
                    sha256 = chunk.sha256 or sha256
                    if len(bundle) > MAX_BUNDLE_BYTES:
                        raise ServerError(f"{self._address} sends a tokenizer above {MAX_BUNDLE_BYTES} bytes; check it")
                self._tokenizer = tokenizer_bundle.unpack(bytes(bundle), sha256)
            except grpc.aio.AioRpcError as err:
                raise self._error(err) from None
            except tokenizer_bundle.BundleError as err:
                raise ServerError(str(err)) from None
        return self._tokenizer

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Piece]:
        """Stream one request. Leaving the iteration early cancels it on the server. Raises ServerError.

        The text has no special tokens, unless asked for, and neither the stop token nor the stop string that ended it;
        `token_ids` has them all. Pieces of several samples interleave.
        """
        sampling = sampling or SamplingParams()
        tokenizer = await self.fetch_tokenizer()
        texts = [StopText(tokenizer, sampling) for _ in range(sampling.n)]
        request = pb.GenerateRequest(request_id=request_id, stream=True, sampling_params=write_sampling(sampling))
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokenized.input_ids.extend(prompt)
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                if response.HasField("chunk"):
                    chunk = response.chunk
                    text = texts[chunk.index]
                    text.feed([i for i in chunk.token_ids if i not in sampling.stop_token_ids])
                    yield Piece(
                        text=text.take(),
                        token_ids=tuple(chunk.token_ids),
                        index=chunk.index,
                        logprobs=tuple(chunk.output_logprobs.token_logprobs),
                        top_logprobs=_read_top(chunk.output_logprobs.top_logprobs),
                        prompt_logprobs=tuple(one.value for one in chunk.input_logprobs.token_logprobs[1:]),
                        prompt_top_logprobs=_read_top(chunk.input_logprobs.top_logprobs[1:]),
                        prompt_tokens=chunk.prompt_tokens,
                        cached_tokens=chunk.cached_tokens,
                    )
                else:  # its ids repeat the last chunk's
                    done = response.complete
                    text = texts[done.index]
                    text.flush()
                    yield Piece(
                        text=text.take(),
                        index=done.index,
                        finish_reason=done.finish_reason,
                        matched_stop=done.matched_stop_str if done.HasField("matched_stop_str") else None,
                        prompt_tokens=done.prompt_tokens,
                        cached_tokens=done.cached_tokens,
                    )
        except grpc.aio.AioRpcError as err:
            raise self._error(err) from None
        finally:
            call.cancel()  # no effect on a call that has ended

    async def abort(self, *request_ids: str) -> None:
        """End requests by id; unknown ids are ignored. Raises ServerError."""
        try:
            await self._stub.Abort(pb.AbortRequest(request_ids=request_ids), timeout=60)
        except grpc.aio.AioRpcError as err:
            raise self._error(err) from None

    def _error(self, err: grpc.aio.AioRpcError) -> ServerError:
        return server_error(self._address, err.code(), err.details(), "--host and --port")


def address_of(host: str, port: int) -> str:
    """HOST:PORT, as gRPC reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def channel_options(host: str) -> list[tuple[str, int]]:
    """Messages of any size, and no proxy on the way to this machine."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    return [*options, ("grpc.enable_http_proxy", 0)] if _is_loopback(host) else options


def server_error(address: str, code: grpc.StatusCode, details: str | None, flags: str) -> ServerError:
    """What a failed call says; `flags` are those that name the server."""
    details = details or "no reason given"
    # A server of ours says in its own words why it is not available; the transport's words are for experts.
    if code is grpc.StatusCode.UNAVAILABLE and any(
        words in details.lower() for words in ("failed to connect", "dns resolution")
    ):
        remedy = f"start one with `widemesh serve DIR`, or correct {flags}"
        return ServerError(f"no server answers at {address}; {remedy}", code)
    return ServerError(f"{address} answered {code.name}: {details}", code)


def _read_top(tops: Iterable[pb.TopLogProbs]) -> tuple[dict[int, float], ...]:
    return tuple(dict(zip(top.token_ids, top.values, strict=True)) for top in tops)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
