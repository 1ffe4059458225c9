"""An engine without a model: the real one's interface, deterministic tokens, a settable pace, and a memory."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from prometheus_client import Counter

from widemesh.model.config import ModelConfig
from widemesh.serving.agreement import step_schema
from widemesh.serving.engine_calls import EngineError
from widemesh.serving.job import Job
from widemesh.serving.request import Delta, FinishReason, RequestError, SamplingParams, Status
from widemesh.serving.tokens import encode_prompt, load_tokenizer, load_tokenizer_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeConfig:
    """The fields of the real configuration that the service reads."""

    model: str
    served_model_name: str | None = None
    max_model_len: int = 64
    max_num_seqs: int = 4

    @property
    def scheduler(self) -> SimpleNamespace:
        return SimpleNamespace(longest_request=self.max_model_len)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeStats:
    transferred_bytes: int = 0


class FakeEngine:
    """Token k of a prompt is (sum of its ids + k) modulo the vocabulary, or entry k of `script`.

    `delay_s` passes before each delta of `burst` tokens. `asked` lists what came in; `ended` says how each request
    left: a finish reason, or "closed" when its iterator was closed before the end. A request fails after `fail_after`
    tokens, or ends with an error after `err_after`, and the engine stops before it takes request number `die_after`.
    """

    def __init__(
        self, folder: str | Path, *, delay_s: float = 0.0, burst: int = 1, script: list[int] | None = None,
        fail_after: int | None = None, err_after: int | None = None, die_after: int | None = None, **config: object,
    ):
        self.config = FakeConfig(model=str(folder), **config)
        self.share = self.config
        self.model_config = ModelConfig.from_dir(folder)
        self.tokenizer = load_tokenizer(folder)
        self.delay_s, self.burst, self.script = delay_s, burst, script
        self.fail_after, self.err_after, self.die_after = fail_after, err_after, die_after
        self.is_alive = True
        self.experts = self.draft_experts = None  # an ExpertControl each, for tests of that service
        self.job = Job.alone(step_schema(1))
        self.asked: list[tuple[str, list[int], SamplingParams]] = []
        self.ended: dict[str, str] = {}
        self.aborts: list[str] = []
        self.transfer_bytes = 0
        self.priorities: list[int] = []
        self.metrics = Counter("fake:requests", "Requests taken.", registry=None)
        self._running: dict[str, FakeStream] = {}
        self._fresh = itertools.count()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return 0

    def stats(self) -> FakeStats:
        return FakeStats(transferred_bytes=self.transfer_bytes)

    def stream(
        self, prompt, sampling: SamplingParams | None = None, *, request_id: str = "", priority: int = 0
    ) -> FakeStream:
        sampling = sampling or SamplingParams()
        self.priorities.append(priority)
        request_id = request_id or f"fresh-{next(self._fresh)}"
        if len(self.asked) == self.die_after:
            self.is_alive = False
        if not self.is_alive:
            raise EngineError
        if isinstance(prompt, str):
            prompt = encode_prompt(self.tokenizer, prompt, load_tokenizer_config(self.config.model))
        ids = [int(i) for i in prompt]
        if request_id in self._running:
            raise RequestError("request_id", request_id, "is in flight already; choose another", Status.ALREADY_EXISTS)
        for i in ids:
            if i >= self.model_config.vocab_size:
                raise RequestError("input_ids", i, f"must be below the vocabulary size {self.model_config.vocab_size}")
        if len(ids) >= self.config.max_model_len:
            raise RequestError("prompt", len(ids), f"tokens are too many; the limit is {self.config.max_model_len - 1}")
        self.asked.append((request_id, ids, sampling))
        stream = self._running[request_id] = FakeStream(self, request_id, ids, sampling)
        return stream

    def abort(self, request_id: str) -> None:
        self.aborts.append(request_id)
        if request_id in self._running:
            self._running[request_id].wake()

    def close(self) -> None:
        self.is_alive = False
        for stream in list(self._running.values()):
            stream.wake()


class FakeStream:
    """The iterator of one request."""

    def __init__(self, engine: FakeEngine, request_id: str, ids: list[int], sampling: SamplingParams):
        self._engine, self._id, self._ids, self._sampling = engine, request_id, ids, sampling
        room = engine.config.max_model_len - len(ids)
        self._left = min(sampling.max_tokens or room, room)
        self._done = 0
        self._loop = asyncio.get_running_loop()
        self._aborted = asyncio.Event()

    def wake(self) -> None:
        """Abort, from any thread."""
        self._loop.call_soon_threadsafe(self._aborted.set)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Delta:
        if self._id not in self._engine._running:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout(self._engine.delay_s):
                await self._aborted.wait()
        except TimeoutError:
            pass
        else:
            return self._delta([], FinishReason.ABORT)
        if self._engine.fail_after is not None and self._done >= self._engine.fail_after:
            self._leave("failed")
            raise RuntimeError("the device is on fire\nand a second line")
        if self._engine.err_after is not None and self._done >= self._engine.err_after:
            return self._delta([], FinishReason.ERROR)
        new: list[int] = []
        vocab, script = self._engine.model_config.vocab_size, self._engine.script
        for _ in range(self._engine.burst):
            k = self._done + len(new)
            token = script[k] if script is not None and k < len(script) else (sum(self._ids) + k) % vocab
            new.append(token)
            if token in self._sampling.stop_token_ids:
                return self._delta(new, FinishReason.STOP, matched=token)
            if k + 1 == self._left:
                return self._delta(new, FinishReason.LENGTH)
        return self._delta(new)

    async def aclose(self) -> None:
        self._leave("closed")

    def _delta(self, new: list[int], finish: FinishReason | None = None, matched: int | None = None) -> Delta:
        self._done += len(new)
        if finish is not None:
            self._leave(str(finish))
        return Delta(
            request_id=self._id, token_ids=np.array(new, np.int32), finish_reason=finish, matched_token_id=matched,
            prompt_tokens=len(self._ids), completion_tokens=self._done, cached_tokens=0,
        )

    def _leave(self, how: str) -> None:
        if self._engine._running.pop(self._id, None) is not None:
            self._engine.ended[self._id] = how


def expected_tokens(ids: list[int], count: int, vocab: int) -> list[int]:
    """What FakeEngine answers without a script."""
    return [(sum(ids) + k) % vocab for k in range(count)]
