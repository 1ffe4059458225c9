"""The engine as callers see it: prompts in, tokens out, from any thread or asyncio loop."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
import queue
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, cast

import jax
import numpy as np
from jaxtyping import Float, Int32

from widemesh.eplb import ChildPlanner, Reshuffler
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.engram_hash import EngramHash
from widemesh.model.forward import ForwardModel, load_engram_hash
from widemesh.model.loading import load_parameters
from widemesh.model.numerics import numerics_named
from widemesh.serving.agreement import Agreement, step_schema
from widemesh.serving.compile_cache import enable_compile_cache
from widemesh.serving.compile_counter import CompileCounter
from widemesh.serving.config import EngineConfig
from widemesh.serving.delta_stream import DeltaStream
from widemesh.serving.device import DeviceEngine
from widemesh.serving.digests import job_digests
from widemesh.serving.engine_calls import EngineError
from widemesh.serving.engine_request import Request
from widemesh.serving.expert_control import ExpertControl
from widemesh.serving.expert_models import MODEL_NAMES
from widemesh.serving.expert_mover import ExpertMover
from widemesh.serving.job import Job, JobEnd
from widemesh.serving.limits import MAX_PRIORITY, MAX_STOP_IDS
from widemesh.serving.live_experts import LiveExperts
from widemesh.serving.loop import EngineLoop, WeightUpdate
from widemesh.serving.mailbox import Mailbox, on_the_spot
from widemesh.serving.memory_limit import available_memory, refuse_if_too_large
from widemesh.serving.memory_plan import plan_memory
from widemesh.serving.metrics import EngineMetrics
from widemesh.serving.process_config import ProcessConfig
from widemesh.serving.prompt_scores import PromptScores
from widemesh.serving.request import Completion, Delta, FinishReason, RequestError, SamplingParams, Status
from widemesh.serving.samples import Samples
from widemesh.serving.scheduling import ReplayRule, Scheduler, hash_pages
from widemesh.serving.structured import ConstraintCompiler
from widemesh.serving.tokens import encode_prompt, load_tokenizer, load_tokenizer_config
from widemesh.serving.weights import Weights
from widemesh.sharding import make_meshes, request_cpu_devices
from widemesh.sharding.processes import leave_coordinator, start_processes

Prompt = str | Sequence[int] | Int32[np.ndarray, "N"]

_log = logging.getLogger(__name__)


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

    With `processes`, this is one of several that make up the engine; all must be constructed, with the same `config`,
    and each serves the requests that are sent to it. `close` of one ends all. When another process is lost, requests
    end with an error, and this process ends itself with status 70 (`job`). `on_join` gets the job when all have met,
    before anything is loaded: for a process that may be told to stop meanwhile.
    """

    def __init__(
        self, config: EngineConfig, processes: ProcessConfig | None = None, *,
        on_join: Callable[[Job], None] | None = None,
    ):  # fmt: skip
        self.config = config
        processes = processes or ProcessConfig()
        self.share = config.share(processes.num_processes)
        checkpoint = Checkpoint.open(config.model, config.num_speculative_tokens)
        self.model_config = checkpoint.config
        config.check_model(self.model_config)
        rule = ReplayRule(config=config.replay, window=self.model_config.sliding_window,
                          num_layers=self.model_config.num_hidden_layers, max_ratio=self.model_config.max_ratio)
        scheduler: Scheduler[Request] = Scheduler(self.share.scheduler, rule)
        request_cpu_devices(self.share.prefill_devices + self.share.decode_devices)
        self.tokenizer = load_tokenizer(config.model)
        self._tokenizer_config = load_tokenizer_config(config.model)
        engram_hash = load_engram_hash(self.model_config, config.model)
        self.job = self._join(processes, checkpoint)
        self.job.on_end(self._end_job)
        if on_join is not None:
            on_join(self.job)
        try:
            self._open(checkpoint, engram_hash, scheduler, processes)
        except BaseException as err:
            self.job.fail(err)  # the others would wait for this process in a collective
            raise

    def _open(
        self, checkpoint: Checkpoint, engram_hash: EngramHash, scheduler: Scheduler[Request], processes: ProcessConfig
    ) -> None:
        config = self.config
        if processes.num_processes > 1:
            start_processes(self.job.jax_address, rank=processes.process_id, size=processes.num_processes)
        enable_compile_cache()
        self.meshes = make_meshes(
            config.prefill_devices, config.decode_devices, config.tensor_parallel_size, processes.num_processes
        )
        self._weights, self._engram_hash = Weights(checkpoint), engram_hash
        self._whole: tuple[Weights, ForwardModel] | None = None  # made when somebody asks for logits
        self._update_lock = threading.Lock()
        self.device = self._open_device(checkpoint, engram_hash)
        self._compiles = CompileCounter()
        self.device.warm_up()
        models = range(len(self.device.decode.experts))
        movers = [ExpertMover(self.device, model) for model in models if config.enable_eplb]
        for mover in movers:
            mover.warm_up()
        self._compiles.mark_warm()
        traffic = {"prefill": self.device.prefill.traffic, "decode": self.device.decode.traffic}
        self.metrics = EngineMetrics(model_name=config.served_model_name or config.model, compiles=self._compiles,
                                     max_model_len=config.max_model_len, traffic=traffic,
                                     rank=processes.process_id)  # fmt: skip
        self._seeds = np.random.default_rng(config.seed)
        self._lock = threading.Lock()
        self._constraints = ConstraintCompiler(
            config.model, self.model_config.vocab_size, self.model_config.eos_token_ids
        )
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()
        self._in_flight: dict[str, list[Request]] = {}  # by the caller's name, the samples that run
        self._sample_of: dict[str, tuple[str, Request]] = {}  # by the engine's name of a sample, the caller's and it
        if processes.num_processes > 1:
            leave_coordinator()
            self.job.has_loaded(config.ticket_timeout_s)
        agreement = Agreement(self.job.ticket, self.metrics.agreed)
        self._reshufflers: tuple[Reshuffler, ...] = ()
        for model, mover in enumerate(movers):
            self._reshufflers += (self._make_reshuffler(model, mover, processes.process_id),)
        self._loop = EngineLoop(
            self.share, scheduler, self.device, self._forget, self.metrics, agreement, self._end_loop,
            self._reshufflers,
        )  # fmt: skip
        controls = [self._control(model) for model in models]
        self.experts, self.draft_experts = controls[0], controls[1] if len(controls) > 1 else None
        if self.job.failure:
            self._loop.lose(EngineError(self.job.failure))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- running requests -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[Completion]:
        """Run prompts to their ends and return their completions in order. `sampling`: one for all or one each.

        Requests of a lower `priority` number go first, and are the last to be preempted.
        The list is flat: a prompt whose setting has n samples takes n places, in order of their index.
        Raises RequestError for the first prompt that is refused; none of the others is left running then.
        """
        each = [cast(Prompt, prompts)] if _is_one_prompt(prompts) else list(cast(Sequence[Prompt], prompts))
        settings = list(sampling) if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(each)
        if len(settings) != len(each):
            raise RequestError("sampling", len(settings), f"must be one setting or one per prompt ({len(each)})")
        arrived: collections.deque[Delta] = collections.deque()
        unread: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

        def carry(read: Callable[[], None]) -> bool:
            unread.put(read)
            return True

        mailbox = Mailbox(carry)
        asked: list[Samples] = []
        requests: list[Request] = []
        try:
            for prompt, one in zip(each, settings, strict=True):
                samples, added = self._submit(
                    prompt, one, "", arrived.append, priority, mailbox, keeps_deltas=True
                )
                asked.append(samples)
                requests += added
            return self._collect(asked, arrived, unread)
        except BaseException:
            self._loop.abort(requests)
            raise

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, request_id: str = "", priority: int = 0
    ) -> DeltaStream:
        """Start a request and iterate over its deltas; the last one of each of its samples has a finish_reason.

        The request is checked and queued by this call, which raises RequestError if it is refused. Must be called
        from a running asyncio loop. Closing or cancelling the iteration aborts the request; an iterator that is
        never started must be closed with `aclose`. An empty request_id gets a fresh one. `priority` as in `generate`.
        """
        arrived: asyncio.Queue[Delta] = asyncio.Queue()
        mailbox = self._mailbox_of(asyncio.get_running_loop())
        samples, requests = self._submit(
            prompt, sampling or SamplingParams(), request_id, arrived.put_nowait, priority, mailbox
        )
        # Of these requests, whatever has their name by then.
        abort, drop = (functools.partial(end, requests) for end in (self._loop.abort, self._loop.drop))
        return DeltaStream(samples, arrived, abort, drop)

    def compile_constraint(self, sampling: SamplingParams) -> None:
        """Compile what `sampling` says of the output's form, so that the request that follows is taken at once.

        For callers on an event loop, which a new grammar would hold up for a second. Raises RequestError.
        """
        self._constraints.compile(sampling)

    def abort(self, request_id: str) -> None:
        """End a request; its stream ends with finish_reason abort. Unknown and finished ids are ignored."""
        with self._lock:
            requests = tuple(self._in_flight.get(request_id, ()))
        self._loop.abort(requests)

    # --- weights and research -------------------------------------------------------------------------------------

    def update_weights(
        self, tensors: Mapping[str, Any], in_flight: Literal["finish", "abort"] = "finish"
    ) -> int:
        """Replace weights while serving; returns the new version, which every later result carries.

        `tensors` maps released tensor names to float32 or bfloat16 arrays of the released shapes; what it does not
        name stays. They are applied at a step boundary, when the requests that have begun are finished, or have been
        aborted for `in_flight="abort"`; others wait and start on the new weights. The prefix cache is emptied. Nothing
        is compiled. Blocks until it is done: call it from a thread of its own inside an event loop. With several
        processes it must be called in each of them, with the same tensors, and is done when it is in all.

        Raises ValueError that names a tensor which does not fit, and EngineError if the engine ends before.
        """
        if in_flight not in ("finish", "abort"):
            raise ValueError(f"in_flight={in_flight!r} is unknown; use 'finish' or 'abort'")
        with self._update_lock:
            weights = self._weights.updated(tensors)
            with self._experts_held():
                update = WeightUpdate(
                    prefill=self.device.prefill.place(weights.read),
                    decode=self.device.decode.place(weights.read),
                    aborts=in_flight == "abort",
                )
                if not self._loop.update_weights(update):
                    raise EngineError
            self._weights = weights
            return update.version

    @contextlib.contextmanager
    def _experts_held(self) -> Iterator[None]:
        """No expert changes its slot meanwhile: weights are being laid out for the placement of now."""
        with contextlib.ExitStack() as held:
            for reshuffler in self._reshufflers:
                self._loop.call(reshuffler.hold)
                held.callback(self._loop.call, reshuffler.release)
            yield

    @property
    def weights_version(self) -> int:
        """How many times the weights have been updated."""
        return self._loop.weights_version

    def logits(self, prompt: Prompt) -> Float[np.ndarray, "S V"]:
        """f32 logits of every position of a prompt, by one exact forward on one device, beside the serving.

        The first call keeps a second copy of the weights; each new power of two in length compiles a program.
        """
        return self._forward().logits(self._prompt_ids(prompt))

    def hidden_states(self, prompt: Prompt) -> Float[np.ndarray, "S D"]:
        """Final normed hidden state of every position of a prompt, as `logits`."""
        return self._forward().hidden(self._prompt_ids(prompt))

    def _forward(self) -> ForwardModel:
        with self._update_lock:
            if self._whole is None or self._whole[0] is not self._weights:
                backbone, numerics = self.model_config.with_draft(0), numerics_named(self.config.numerics)
                owner = np.arange(backbone.n_routed_experts)
                parameters = load_parameters(backbone, numerics, owner, self._weights.read)
                model = ForwardModel(backbone, parameters, self._engram_hash, numerics, self.config.page_size)
                self._whole = self._weights, model
            return self._whole[1]

    def close(self) -> None:
        """Stop. Requests in flight end with finish_reason abort. Idempotent."""
        self._loop.stop()
        self._compiles.close()

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

    def _open_device(self, checkpoint: Checkpoint, engram_hash: EngramHash) -> DeviceEngine:
        """Everything on the devices. Raises ConfigError if it would not fit; nothing is allocated before."""
        plan, num_processes = plan_memory(self.model_config, self.config), self.job.ticket.size
        refuse_if_too_large(plan, available_memory(jax.local_devices()), num_processes)
        return DeviceEngine(self.share, checkpoint, engram_hash, self.meshes)

    def _make_reshuffler(self, model: int, mover: ExpertMover, rank: int) -> Reshuffler:
        """Of one model, on the decode mesh."""
        placed, config = self.device.decode.experts[model], self.config.eplb_of(model)
        planner = ChildPlanner(placed.layout, config, on_answer=lambda: self._loop.wake())
        return Reshuffler(
            MODEL_NAMES[model], placed.layout, config, placed.slot_owner, mover, planner, rank=rank,
            listener=self.metrics, goes_after=self._reshufflers[-1] if self._reshufflers else None,
        )  # fmt: skip

    def _control(self, model: int) -> ExpertControl:
        """Of one model's experts."""
        reshuffler = self._reshufflers[model] if self._reshufflers else None
        return LiveExperts(
            MODEL_NAMES[model], self._loop, self.device.decode.experts[model], reshuffler,
            self.config.eplb_of(model).window_size,
        )  # fmt: skip

    def _join(self, processes: ProcessConfig, checkpoint: Checkpoint) -> Job:
        """Meet the other processes. Raises ConfigError."""
        models = MODEL_NAMES[: 2 if self.model_config.num_speculative_tokens else 1] if self.config.enable_eplb else ()
        schema = step_schema(self.share.max_new_kv_loads_per_step or self.share.max_num_seqs, models)
        return Job.join(processes, schema, job_digests(self.config, checkpoint), self.config.ticket_timeout_s)

    def _end_job(self, end: JobEnd) -> None:
        """A process is lost. The loop's thread may be waiting for it in a collective, so requests end without it."""
        if end.is_failure and hasattr(self, "_loop"):
            self._loop.lose(EngineError(end.reason))

    def _end_loop(self, failure: BaseException | None) -> None:
        """On the loop's thread, when it is over."""
        if failure is not None:
            self.job.fail(failure)
        else:
            self.job.leave(f"rank {self._loop.stopped_by} has ended the job")

    def _submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        request_id: str,
        deliver: Callable[[Delta], None],
        priority: int,
        mailbox: Mailbox | None = None,
        *,
        keeps_deltas: bool = False,
    ) -> tuple[Samples, list[Request]]:
        """Check a request and hand its samples to the loop. Without a mailbox the engine's thread calls `deliver`."""
        mailbox = mailbox or on_the_spot()
        ids = self._prompt_ids(prompt)
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise RequestError("priority", priority, f"must be between {-MAX_PRIORITY} and {MAX_PRIORITY}; use 0")
        self._check_token_ids(sampling)
        constraint = self._constraints.compile(sampling)
        hashes = hash_pages(ids, self.config.page_size)
        room = self.config.scheduler.longest_request - len(ids)
        if sampling.min_tokens > room:
            raise RequestError("min_tokens", sampling.min_tokens,
                               f"exceeds the {room} tokens that max_model_len leaves; use at most that")
        eos = () if sampling.ignore_eos else self.model_config.eos_token_ids
        seed = sampling.seed if sampling.seed is not None else int(self._draw_seed())
        request_id = request_id or uuid.uuid4().hex
        # One sample is enough for the prompt's log-probabilities. It runs every row, so it reads no cached page.
        asked = sampling.prompt_logprobs
        scores = None if asked is None else PromptScores(len(ids) - 1, asked)
        requests = [
            Request(
                request_id=_sample_name(request_id, index, sampling.n),
                prompt=ids,
                page_hashes=hashes,
                sampling=sampling,
                seed=seed + index,
                priority=priority,
                max_tokens=min(sampling.max_tokens or room, room),
                stop_token_ids=frozenset((*sampling.stop_token_ids, *eos)),
                deliver=deliver if sampling.n == 1 else functools.partial(_deliver_sample, deliver, request_id, index),
                mailbox=mailbox,
                constraint=constraint if constraint is None or index == 0 else constraint.fork(),
                prompt_scores=scores if index == 0 else None,
                reads_cache=scores is None or index > 0,
            )
            for index in range(sampling.n)
        ]
        with self._lock:
            if request_id in self._in_flight or any(one.request_id in self._sample_of for one in requests):
                raise RequestError("request_id", request_id, "is already in flight; use another or none",
                                   Status.ALREADY_EXISTS)
            # Known and queued in one step: an abort that comes in between would find nothing to end.
            if not self._loop.post(requests):
                raise EngineError
            self._in_flight[request_id] = list(requests)
            self._sample_of |= {one.request_id: (request_id, one) for one in requests}
        samples = Samples(
            request_id, self.tokenizer, sampling, lambda index: self._end_sample(requests[index]),
            keeps_deltas=keeps_deltas,
        )  # fmt: skip
        return samples, requests

    def _check_token_ids(self, sampling: SamplingParams) -> None:
        vocab = self.model_config.vocab_size
        for field, tokens in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias or ())):
            for token in tokens:
                if token >= vocab:
                    raise RequestError(field, token, f"must be below {vocab}; use ids of the vocabulary")
        most = MAX_STOP_IDS - len(self.model_config.eos_token_ids)
        if len(sampling.stop_token_ids) > most:
            raise RequestError("stop_token_ids", f"{len(sampling.stop_token_ids)} ids",
                               f"is more than the {most} a request may have; send fewer")

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
        sizes = self.config.scheduler
        if len(ids) >= sizes.longest_request:
            raise RequestError("prompt", f"{len(ids)} tokens", f"can never fit: {sizes.decode_pages} decode pages and "
                               f"{sizes.prefill_pages} prefill pages of page_size={sizes.page_size} hold a request of "
                               f"{sizes.longest_request} tokens, output included; send fewer")  # fmt: skip
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

    def _end_sample(self, request: Request) -> None:
        """Its reader has found a stop string, and may use its name again."""
        self._forget(request)
        self._loop.abort((request,), FinishReason.STOP)

    def _forget(self, request: Request) -> None:
        """It has ended. Called again when the loop has ended it too; the name may be another's by then."""
        with self._lock:
            request_id, known = self._sample_of.get(request.request_id, ("", None))
            if known is not request:
                return
            del self._sample_of[request.request_id]
            left = self._in_flight[request_id]
            left.remove(request)
            if not left:
                del self._in_flight[request_id]

    def _mailbox_of(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """The one mailbox of all requests that an asyncio loop reads."""
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            reader = weakref.ref(loop)

            def carry(read: Callable[[], None]) -> bool:
                loop = reader()
                try:
                    return loop is not None and bool(loop.call_soon_threadsafe(read))
                except RuntimeError:  # it is closed
                    return False

            mailbox = self._mailboxes.setdefault(loop, Mailbox(carry))
        return mailbox

    def _collect(
        self, asked: list[Samples], arrived: collections.deque[Delta], unread: queue.SimpleQueue[Callable[[], None]]
    ) -> list[Completion]:
        by_id = {samples.request_id: samples for samples in asked}
        left = set(by_id)
        while left:
            while not arrived:
                unread.get()()
            delta = arrived.popleft()
            by_id[delta.request_id].take(delta)
            if by_id[delta.request_id].is_done:
                left.discard(delta.request_id)
        done = [completion for samples in asked for completion in samples.completions()]
        if any(completion.finish_reason is FinishReason.ERROR for completion in done):
            _log.error("some requests ended with an error; see finish_reason")
        return done


def _sample_name(request_id: str, index: int, n: int) -> str:
    """The engine's own name of one sample."""
    return request_id if n == 1 else f"{request_id}#{index}"


def _deliver_sample(deliver: Callable[[Delta], None], request_id: str, index: int, delta: Delta) -> None:
    deliver(dataclasses.replace(delta, request_id=request_id, index=index))


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    if isinstance(prompts, str | np.ndarray):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer)
