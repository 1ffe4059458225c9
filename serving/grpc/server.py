"""The gRPC server: port, transport settings, health, reflection, signals and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from widemesh.model.config import ConfigError
from widemesh.serving.grpc.experts_servicer import SERVICE_NAME as EXPERTS_NAME
from widemesh.serving.grpc.experts_servicer import ExpertsService
from widemesh.serving.grpc.protos.experts_pb2_grpc import add_ExpertsServicer_to_server
from widemesh.serving.grpc.servicer import SERVICE_NAME, VllmEngineService
from widemesh.serving.job import LOST_STATUS, Job, JobEnd, exit_after, exit_now

if TYPE_CHECKING:
    from widemesh.serving.engine import Engine

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
ALIVE_CHECK_S = 1.0  # how soon health follows an engine that stopped
TELL_S = 1.0  # for streams to be told that the job of several processes is lost; less than the job's own end takes
DRAIN_S = 3.0  # for running streams to end with "abort" after the engine is told to close
CANCEL_S = 0.5  # for calls that remain: health watches, slow readers
EXIT_S = 4.5  # after a signal the process ends, whatever hangs

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the gRPC server listens."""

    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0 opens the server to the network, without encryption
    port: int = 50051  # 0: any free port

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host='' must be an address to listen on; use 127.0.0.1")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be between 0 and 65535; use 50051")


class GrpcServer:
    """A server on the event loop it is made on: `start`, then `set_engine` once the model is loaded, then `stop`.

    It answers from `start` on: health checks say NOT_SERVING for the engine's services, and other calls UNAVAILABLE,
    until there is an engine. "" in health checks is liveness, a service's name readiness.
    """

    def __init__(self, config: ServerConfig):
        self.config = config
        self.port = config.port  # the bound one after `start`
        self._service = VllmEngineService()
        self._health = health.aio.HealthServicer()
        self._engine: Engine | None = None
        self._watch: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(options=_OPTIONS)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._service, self._server)
        add_ExpertsServicer_to_server(ExpertsService(self._service.ready_engine), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE_NAME, EXPERTS_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be listened on."""
        host, port = self.config.host, self.config.port
        _check_can_listen(host, port)
        address = f"[{host}]" if ":" in host else host
        try:
            self.port = self._server.add_insecure_port(f"{address}:{port}")
        except RuntimeError as err:  # taken between the check and here
            raise ConfigError(_cannot_listen(host, port, str(err))) from None
        await self._set_health("", True)
        await self._set_ready(False)
        await self._server.start()

    async def set_engine(self, engine: Engine) -> None:
        """Serve this engine, which `stop` closes."""
        self._engine = engine
        self._service.set_engine(engine)
        await self._set_ready(True)
        self._watch = asyncio.create_task(self._watch_engine(engine))

    async def stop(self) -> None:
        """End: NOT_SERVING, no new requests, running streams end with finish_reason abort, then the port closes."""
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        self._service.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                if self._engine is not None:
                    await _in_daemon_thread(self._engine.close)  # the pool of threads may be full of long prompts
                await self._service.wait_idle()
        await self._server.stop(CANCEL_S)

    async def tell_loss(self) -> None:
        """The engine's processes have lost each other: NOT_SERVING, and every open stream gets UNAVAILABLE."""
        await self._set_health("", False)
        await self._set_ready(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_S):
                await self._service.wait_idle()
        await self._server.stop(CANCEL_S)  # watchers of health have been told by then

    async def _watch_engine(self, engine: Engine) -> None:
        while engine.is_alive:
            await asyncio.sleep(ALIVE_CHECK_S)
        logger.error("the engine has stopped; requests are refused until the server is restarted")
        await self._set_health("", False)
        await self._set_ready(False)

    async def _set_ready(self, is_serving: bool) -> None:
        for service in (SERVICE_NAME, EXPERTS_NAME):
            await self._set_health(service, is_serving)

    async def _set_health(self, service: str, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        await self._health.set(service, status.SERVING if is_serving else status.NOT_SERVING)


MakeEngine = Callable[[Callable[[Job], None]], "Engine"]  # it hands on the job as soon as the processes have met


def serve(make_engine: MakeEngine, config: ServerConfig, *, on_ready: Callable[[int], None]) -> None:
    """Listen, make the engine, serve until SIGINT or SIGTERM. Blocks; call it from the main thread.

    The port is bound first, so that a taken one is known before a model is loaded. Raises ConfigError for that and
    whatever `make_engine` raises. `on_ready` gets the bound port once requests are taken. After a signal the process
    ends with status 0 within 5 s, even while the model is still loading or when the engine hangs. With several
    processes the others do so too; when one of them is lost, this one ends with status 70.
    """
    asyncio.run(_serve(make_engine, config, on_ready))


async def _serve(make_engine: MakeEngine, config: ServerConfig, on_ready: Callable[[int], None]) -> None:
    server = GrpcServer(config)
    await server.start()
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()

    def on_signal() -> None:
        exit_after(EXIT_S, 0)
        signalled.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    stopping = asyncio.create_task(signalled.wait())
    jobs: list[Job] = []
    loading = asyncio.ensure_future(_in_daemon_thread(lambda: make_engine(jobs.append)))
    try:
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            logger.info("stopped while the model was loading")
            for job in jobs:
                job.stop()
            await server.stop()
            exit_now(0)
        end = jobs[0].end if jobs else None
        if loading.exception() is not None and end is not None and end.is_others:  # what it stumbled over is no news
            exit_now(LOST_STATUS if end.is_failure else 0)
        if end is not None and end.is_failure and _is_from_devices(loading.exception()):  # the job has said it
            exit_now(LOST_STATUS)
        engine = await loading
        await server.set_engine(engine)
        ended: asyncio.Future[JobEnd] = loop.create_future()

        def on_end(end: JobEnd) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
                loop.call_soon_threadsafe(_settle, ended, end)

        engine.job.on_end(on_end)
        on_ready(server.port)
        await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and ended.result().is_failure:
            await server.tell_loss()
            exit_now(LOST_STATUS)
        if not stopping.done():
            exit_after(EXIT_S, 0)
        logger.info("shutting down%s", f": {ended.result().reason}" if ended.done() else "")
    finally:
        stopping.cancel()
        await server.stop()


def _settle[T](future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _is_from_devices(err: BaseException | None) -> bool:
    """Whether it tells of devices and what connects them, not of a place in the code."""
    from jax.errors import JaxRuntimeError  # jax runs by now, if one was raised

    return isinstance(err, JaxRuntimeError)


async def _in_daemon_thread[T](function: Callable[[], T]) -> T:
    """Run a function that cannot be interrupted, such that the process can end without it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def work() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (function(), None)
        except BaseException as err:
            outcome = (None, err)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="widemesh-server", daemon=True).start()
    return await future


def _check_can_listen(host: str, port: int) -> None:
    """Raise ConfigError, in words, where gRPC would only say that it failed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as err:
        raise ConfigError(_cannot_listen(host, port, err.strerror or str(err))) from None


def _cannot_listen(host: str, port: int, reason: str) -> str:
    return f"port={port} on host={host} cannot be listened on ({reason}); choose another with --port or --host"
