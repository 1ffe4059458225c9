"""The engine as callers see it: prompts in, tokens out, from any thread or asyncio loop."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import cast

import numpy as np
from jaxtyping import Int32

from widemesh.model.checkpoint import Checkpoint
from widemesh.model.config import ConfigError
from widemesh.model.forward import load_engram_hash
from widemesh.serving.compile_cache import enable_compile_cache
from widemesh.serving.config import EngineConfig
from widemesh.serving.device import DeviceEngine
from widemesh.serving.loop import EngineLoop
from widemesh.serving.request import (
    Completion,
    Delta,
    FinishReason,
    RequestError,
    SamplingParams,
    Status,
)
from widemesh.serving.scheduler import Request
from widemesh.serving.tokens import encode_prompt, load_tokenizer, load_tokenizer_config
from widemesh.sharding import make_meshes, request_cpu_devices

Prompt = str | Sequence[int] | Int32[np.ndarray, "N"]

_log = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """The engine is closed or has failed and cannot take requests."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Totals since start, of finished requests and of tokens."""

    requests: int
    prompt_tokens: int
    generated_tokens: int
    transferred_bytes: int  # request state moved from the prefill mesh to the decode mesh


class Engine:
    """Serves one checkpoint with a prefill mesh and a decode mesh. Thread-safe; a context manager.

    Construction loads the weights and compiles every program; progress is logged. Raises ConfigError,
    CheckpointError or MeshError when the checkpoint or the devices cannot be used.
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        checkpoint = Checkpoint.open(config.model)
        self.model_config = checkpoint.config
        if config.max_model_len > self.model_config.max_position_embeddings:
            raise ConfigError(f"max_model_len={config.max_model_len} exceeds the model's max_position_embeddings="
                              f"{self.model_config.max_position_embeddings}; use at most that")
        request_cpu_devices(config.prefill_devices + config.decode_devices)
        self.meshes = make_meshes(config.prefill_devices, config.decode_devices)
        self.tokenizer = load_tokenizer(config.model)
        self._tokenizer_config = load_tokenizer_config(config.model)
        engram_hash = load_engram_hash(self.model_config, config.model)
        enable_compile_cache()
        self.device = DeviceEngine(config, checkpoint, engram_hash, self.meshes)
        self.device.warm_up()
        self._seeds = np.random.default_rng(config.seed)
        self._lock = threading.RLock()  # garbage collection may drop a stream, and so abort, while it is held
        self._in_flight: dict[str, Request] = {}
        self._loop = EngineLoop(config, self.device, self._forget)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- running requests -----------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Run prompts to their ends and return their completions in order. `sampling`: one for all or one each.

        Raises RequestError for the first prompt that is refused; none of the others is left running then.
        """
        each = [cast(Prompt, prompts)] if _is_one_prompt(prompts) else list(cast(Sequence[Prompt], prompts))
        settings = list(sampling) if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(each)
        if len(settings) != len(each):
            raise RequestError("sampling", len(settings), f"must be one setting or one per prompt ({len(each)})")
        arrived: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        ids: list[str] = []
        try:
            for prompt, one in zip(each, settings, strict=True):
                ids.append(self._submit(prompt, one, "", arrived.put))
            return self._collect(ids, arrived)
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, request_id: str = ""
    ) -> DeltaStream:
        """Start a request and iterate over its deltas; the last one has a finish_reason.

        The request is checked and queued by this call, which raises RequestError if it is refused. Must be called
        from a running asyncio loop. Closing or cancelling the iteration aborts the request; an iterator that is
        never started must be closed with `aclose`. An empty request_id gets a fresh one.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Delta] = asyncio.Queue()

        def deliver(delta: Delta) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, delta)
            except RuntimeError:  # the loop is closed: nobody reads this any more
                self.abort(delta.request_id)

        started = self._submit(prompt, sampling or SamplingParams(), request_id, deliver)
        return DeltaStream(started, arrived, self.abort)

    def abort(self, request_id: str) -> None:
        """End a request; its stream ends with finish_reason abort. Unknown and finished ids are ignored."""
        with self._lock:
            if request_id not in self._in_flight:
                return
        self._loop.abort(request_id)

    def close(self) -> None:
        """Stop. Requests in flight end with finish_reason abort. Idempotent."""
        self._loop.stop()

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken."""
        return self._loop.is_running

    @property
    def num_running(self) -> int:
        """Requests that hold a decode slot."""
        return self._loop.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._loop.num_waiting

    @property
    def transfer_bytes(self) -> int:
        """Bytes of request state moved from the prefill mesh to the decode mesh so far."""
        return self.device.transfer.moved_bytes

    def stats(self) -> EngineStats:
        """Totals since start."""
        return EngineStats(**dataclasses.asdict(self._loop.counters), transferred_bytes=self.transfer_bytes)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _submit(
        self, prompt: Prompt, sampling: SamplingParams, request_id: str, deliver: Callable[[Delta], None]
    ) -> str:
        """Check a request and hand it to the loop; returns its id."""
        ids = self._prompt_ids(prompt)
        for token in sampling.stop_token_ids:
            if token >= self.model_config.vocab_size:
                raise RequestError("stop_token_ids", token,
                                   f"must be below {self.model_config.vocab_size}; use ids of the vocabulary")
        room = self.config.max_model_len - len(ids)
        eos = () if sampling.ignore_eos else self.model_config.eos_token_ids
        seed = sampling.seed if sampling.seed is not None else int(self._draw_seed())
        request = Request(
            request_id=request_id or uuid.uuid4().hex,
            prompt=ids,
            sampling=sampling,
            seed=seed,
            max_tokens=min(sampling.max_tokens or room, room),
            stop_token_ids=frozenset((*sampling.stop_token_ids, *eos)),
            deliver=deliver,
        )
        with self._lock:
            if request.request_id in self._in_flight:
                raise RequestError("request_id", request.request_id, "is already in flight; use another or none",
                                   Status.ALREADY_EXISTS)
            # Known and queued in one step: an abort that comes in between would find nothing to end.
            if not self._loop.post(request):
                raise EngineError("the engine is closed or has failed; start a new one")
            self._in_flight[request.request_id] = request
        return request.request_id

    def _prompt_ids(self, prompt: Prompt) -> Int32[np.ndarray, "N"]:
        """Token ids of a prompt, as one array that nobody else writes to."""
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("prompt", prompt, "is empty; give at least one character")
            prompt = encode_prompt(self.tokenizer, prompt, self._tokenizer_config)
        ids = np.array(prompt)
        vocab, limit, image = self.model_config.vocab_size, self.config.max_model_len, self.model_config.image_token_id
        if ids.size == 0:
            raise RequestError("prompt", "", "is empty; give at least one token")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError("prompt", f"{ids.dtype} of shape {ids.shape}", "must be text or a list of token ids")
        if len(ids) >= limit:
            raise RequestError("prompt", f"{len(ids)} tokens", "leaves no room for output within max_model_len="
                               f"{limit}; give at most {limit - 1} tokens or raise max_model_len")  # fmt: skip
        outside = (ids < 0) | (ids >= vocab)
        if outside.any():
            raise RequestError("prompt", int(ids[outside][0]),
                               f"is outside the vocabulary; use ids from 0 to {vocab - 1}")
        if (ids == image).any():
            raise RequestError("prompt", image, "is the image placeholder and images are not supported; remove it")
        return ids.astype(np.int32)

    def _draw_seed(self) -> int:
        with self._lock:
            return int(self._seeds.integers(2**31))

    def _forget(self, request: Request) -> None:
        with self._lock:
            self._in_flight.pop(request.request_id, None)

    def _collect(self, ids: list[str], arrived: queue.SimpleQueue[Delta]) -> list[Completion]:
        parts: dict[str, list[np.ndarray]] = {request_id: [] for request_id in ids}
        last: dict[str, Delta] = {}
        while len(last) < len(ids):
            delta = arrived.get()
            parts[delta.request_id].append(delta.token_ids)
            if delta.finish_reason is not None:
                last[delta.request_id] = delta
        if any(delta.finish_reason is FinishReason.ERROR for delta in last.values()):
            _log.error("some requests ended with an error; see finish_reason")
        return [self._completion(last[i], np.concatenate(parts[i])) for i in ids]

    def _completion(self, last: Delta, token_ids: np.ndarray) -> Completion:
        ends_with_stop = last.matched_token_id is not None
        shown = token_ids[:-1] if ends_with_stop else token_ids
        assert last.finish_reason is not None
        return Completion(
            request_id=last.request_id,
            token_ids=token_ids,
            text=self.tokenizer.decode(shown.tolist()),
            finish_reason=last.finish_reason,
            prompt_tokens=last.prompt_tokens,
            cached_tokens=last.cached_tokens,
            matched_token_id=last.matched_token_id,
        )


class DeltaStream(AsyncIterator[Delta]):
    """Deltas of one request. Leaving the iteration early, by `aclose` or by cancellation, aborts the request."""

    def __init__(self, request_id: str, arrived: asyncio.Queue[Delta], abort: Callable[[str], None]):
        self.request_id = request_id
        self._arrived, self._abort = arrived, abort
        self._is_done = False

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        if self._is_done:
            raise StopAsyncIteration
        try:
            delta = await self._arrived.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        self._is_done = delta.finish_reason is not None
        return delta

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        if not self._is_done:
            self._is_done = True
            self._abort(self.request_id)

    def __del__(self) -> None:
        if not self._is_done:
            self._abort(self.request_id)


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    if isinstance(prompts, str | np.ndarray):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
