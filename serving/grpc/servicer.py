"""`vllm.grpc.engine.VllmEngine` over an engine: what each call does. The transport around it is in server.py."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, NoReturn

import grpc
import numpy as np
from jaxtyping import Int32
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from widemesh.model.config import MODEL_TYPE
from widemesh.serving.engine_calls import EngineError
from widemesh.serving.grpc import tokenizer_bundle
from widemesh.serving.grpc.convert import GenerateCall, read_priority, read_request, write_chunk, write_complete
from widemesh.serving.grpc.request_log import RequestLog
from widemesh.serving.request import Delta, FinishReason, RequestError
from widemesh.serving.tokens import encode_prompt, load_tokenizer_config

if TYPE_CHECKING:
    from widemesh.serving.engine import Engine

logger = logging.getLogger(__name__)

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
# An error's text travels in a header, each byte that is not ASCII as three; keep well below the usual 8 KiB.
MAX_DETAIL_BYTES = 1000


@dataclasses.dataclass(eq=False, kw_only=True)
class _Encoding:
    """A request whose prompt is being encoded or whose grammar is being compiled.

    The engine does not know it yet, but it can be aborted already.
    """

    request_id: str
    is_aborted: bool = False


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The service. Until `engine` is set and after `close` every call that needs one answers UNAVAILABLE.

    Lives on one event loop. A call that ends early, because the client went away or its deadline passed, aborts its
    request in the engine before the handler returns.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._tokenizer_config: dict = {}
        self._is_closing = False
        self._encoding: set[_Encoding] = set()
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._start_s = time.monotonic()
        self._last_receive_unix_s = 0.0

    def set_engine(self, engine: Engine) -> None:
        """Begin to serve. Raises ConfigError if the folder's tokenizer_config.json cannot be read."""
        self._tokenizer_config = load_tokenizer_config(engine.config.model)
        self._engine = engine

    def close(self) -> None:
        """Refuse new requests; requests that are still being encoded end with finish_reason abort."""
        self._is_closing = True

    async def wait_idle(self) -> None:
        """Return when no Generate call is running."""
        await self._idle.wait()

    # --- Generate and Abort ---------------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        engine = await self.ready_engine(context)
        self._last_receive_unix_s = time.time()
        log = RequestLog(request.request_id)
        self._num_active += 1
        self._idle.clear()
        try:
            await self._generate(engine, read_request(request), context, log)
        except RequestError as err:
            log.finish = f"refused:{err.status.value}"
            await abort(context, grpc.StatusCode[err.status.value], str(err))
        except EngineError as err:  # it has stopped since this call began
            log.finish = "refused:UNAVAILABLE"
            await abort(context, grpc.StatusCode.UNAVAILABLE, self._problem() or str(err))
        except asyncio.CancelledError:
            log.finish = "cancelled"
            raise
        except Exception as err:
            if context.cancelled():  # a message could not be sent: the client is gone
                log.finish = "cancelled"
                return
            if engine.job.failure:
                log.finish = "lost"
                await abort(context, grpc.StatusCode.UNAVAILABLE, _lost(engine))
            log.finish = "error"
            logger.exception("request %r failed", log.request_id[:128])
            reason = str(err).split("\n", 1)[0][:200]
            await abort(context, grpc.StatusCode.INTERNAL,
                        f"the request failed inside the engine ({type(err).__name__}: {reason}); see the server's log")
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._idle.set()
            log.write()

    async def _generate(
        self, engine: Engine, call: GenerateCall, context: grpc.aio.ServicerContext, log: RequestLog
    ) -> None:
        prompt = call.prompt
        if isinstance(prompt, str) or call.sampling.constraint is not None:
            encoding = _Encoding(request_id=call.request_id)
            self._encoding.add(encoding)
            try:  # a long text or a new grammar takes a second: not on the loop that streams the others
                prompt = await asyncio.to_thread(self._prepare, engine, call)
            finally:
                self._encoding.discard(encoding)
            if encoding.is_aborted or self._is_closing:
                none = np.zeros(0, np.int32)
                for index in range(call.sampling.n):
                    aborted = Delta(request_id=call.request_id, token_ids=none, index=index,
                                    finish_reason=FinishReason.ABORT, prompt_tokens=len(prompt))
                    log.add(aborted)
                    await context.write(write_complete(aborted, prompt))
                return
        deltas = engine.stream(
            prompt, call.sampling, request_id=call.request_id, priority=read_priority(context.invocation_metadata())
        )
        log.accepted()
        async with contextlib.aclosing(deltas):  # leaving early aborts the request
            collected: list[list[Delta]] = [[] for _ in range(call.sampling.n)]
            num_left = call.sampling.n
            async for delta in deltas:
                if delta.finish_reason is FinishReason.ERROR and engine.job.failure:
                    raise ConnectionError(engine.job.failure)
                log.add(delta)
                if not call.stream:
                    collected[delta.index].append(delta)
                elif len(delta.token_ids):
                    await context.write(write_chunk(delta, prompt))
                if delta.finish_reason is not None:
                    last = delta if call.stream else Delta.join(collected[delta.index])
                    await context.write(write_complete(last, prompt))
                    num_left -= 1
                    if num_left == 0:
                        return
        raise RuntimeError("the engine ended a request without a finish reason")

    def _prepare(self, engine: Engine, call: GenerateCall) -> Int32[np.ndarray, " S"]:
        """Token ids of the prompt; the engine has compiled the call's constraint when this returns."""
        if call.sampling.constraint is not None:
            engine.compile_constraint(call.sampling)
        if isinstance(call.prompt, str):
            return encode_prompt(engine.tokenizer, call.prompt, self._tokenizer_config)
        return call.prompt

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Their streams end with finish_reason abort. Unknown and finished ids are ignored."""
        request_ids = {i for i in request.request_ids if i}
        for encoding in self._encoding:
            encoding.is_aborted |= encoding.request_id in request_ids
        if self._engine is not None:
            for request_id in request_ids:
                self._engine.abort(request_id)
        return pb.AbortResponse()

    # --- health and facts -----------------------------------------------------------------------------------------

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        problem = self._problem()
        return pb.HealthCheckResponse(healthy=not problem, message=problem or "ready")

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        engine = await self.ready_engine(context)
        config, model = engine.config, engine.model_config
        return pb.GetModelInfoResponse(
            model_path=str(config.model),
            is_generation=True,
            max_context_length=config.max_model_len,
            vocab_size=model.vocab_size,
            supports_vision=False,
            served_model_name=config.served_model_name or str(config.model),
            tokenizer_path=str(config.model),
            model_type=MODEL_TYPE,
            architectures=model.to_json()["architectures"],
            eos_token_ids=model.eos_token_ids,
            pad_token_id=model.pad_token_id,
            bos_token_id=model.bos_token_id,
            max_req_input_len=config.scheduler.longest_request - 1,  # one token must have room
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        engine = await self.ready_engine(context)
        return pb.GetServerInfoResponse(
            active_requests=engine.num_running + engine.num_waiting,
            is_paused=False,
            last_receive_timestamp=self._last_receive_unix_s,
            uptime_seconds=time.monotonic() - self._start_s,
            server_type="vllm-grpc",  # the protocol's name for servers of this service
            constrained_decoding_start="first_token",
            data_parallel_size=1,
            max_num_seqs=engine.share.max_num_seqs,
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> None:
        engine = await self.ready_engine(context)
        try:
            bundle = await asyncio.to_thread(tokenizer_bundle.pack, engine.config.model)
        except OSError as err:
            logger.exception("the tokenizer files cannot be read")
            await abort(context, grpc.StatusCode.INTERNAL, f"the tokenizer files cannot be read ({err.strerror})")
        for chunk in tokenizer_bundle.cut(bundle):
            await context.write(chunk)

    # --- not offered ----------------------------------------------------------------------------------------------

    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        await _not_offered(context, "Embed", "this server generates text only")

    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        await _not_offered(context, "GetLoads", "use GetServerInfo for the number of active requests")

    async def FlushCache(self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        await _not_offered(context, "FlushCache", "the prefix cache is emptied by new weights only")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> NoReturn:
        await _not_offered(context, "StartProfile", "profile the process from outside")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        await _not_offered(context, "StopProfile", "profile the process from outside")

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        await _not_offered(context, "SubscribeKvEvents", "events of the prefix cache are not reported")

    # --- readiness ------------------------------------------------------------------------------------------------

    def _problem(self) -> str:
        """Why no request can be taken now; empty when one can."""
        if self._is_closing:
            return "the server is shutting down; send the request to another one"
        if self._engine is None:
            return f"the model is still loading; wait until grpc.health.v1 reports SERVING for {SERVICE_NAME}"
        if not self._engine.is_alive:
            return _lost(self._engine) or "the engine has stopped; see the server's log and restart it"
        return ""

    async def ready_engine(self, context: grpc.aio.ServicerContext) -> Engine:
        """The engine; without one, the call ends here with UNAVAILABLE and the reason."""
        problem = self._problem()
        if problem or self._engine is None:
            await abort(context, grpc.StatusCode.UNAVAILABLE, problem)
        return self._engine


def _lost(engine: Engine) -> str:
    """Why the engine's processes cannot go on together; empty if they can."""
    reason = engine.job.failure
    return f"this server's group of processes has ended ({reason}); send the request to another one" if reason else ""


async def abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, detail: str) -> NoReturn:
    """End a call with an error that is short enough to travel."""
    await context.abort(code, detail.encode(errors="replace")[:MAX_DETAIL_BYTES].decode(errors="ignore"))
    raise AssertionError("unreachable: abort raises")


async def _not_offered(context: grpc.aio.ServicerContext, call: str, reason: str) -> NoReturn:
    await abort(context, grpc.StatusCode.UNIMPLEMENTED, f"{call} is not supported yet; {reason}")
