"""`widemesh serve DIR`: a checkpoint behind the gRPC service, until SIGINT or SIGTERM, by one process or several."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from widemesh.model.config import ConfigError
from widemesh.serving.config import EngineConfig
from widemesh.serving.grpc.server import ServerConfig, serve
from widemesh.serving.metrics_endpoint import MetricsConfig, MetricsEndpoint
from widemesh.serving.process_config import ProcessConfig
from widemesh.tools.logs import log_to_stderr
from widemesh.tools.settings import parse_with_file

if TYPE_CHECKING:
    from widemesh.serving.engine import Engine
    from widemesh.serving.job import Job

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFlags(EngineConfig):
    """The engine's settings, with the checkpoint folder as the one positional argument."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")] = ""  # checkpoint folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a checkpoint folder over gRPC (vllm.grpc.engine.VllmEngine)."""

    engine: Annotated[EngineFlags, tyro.conf.arg(name="")]  # no prefix, but `eplb.` keeps its own
    server: tyro.conf.OmitArgPrefixes[ServerConfig]
    metrics: tyro.conf.OmitArgPrefixes[MetricsConfig]
    processes: tyro.conf.OmitArgPrefixes[ProcessConfig]
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None  # YAML file of these settings; flags win

    @classmethod
    def parse(cls, prog: str, args: Sequence[str]) -> Serve:
        """Read flags and the file of `--config`. Raises ConfigError; exits with status 2 on wrong flags."""
        parsed = parse_with_file(cls, prog, args, (EngineFlags, ServerConfig, MetricsConfig, ProcessConfig))
        if not parsed.engine.model:
            raise ConfigError(f"the checkpoint folder is missing; use `{prog} DIR`")
        parsed.engine.share(parsed.processes.num_processes)
        return parsed

    def run(self) -> None:
        log_to_stderr()
        page = MetricsEndpoint()
        try:
            if self.metrics.metrics_port is not None:
                host, port = self.server.host, page.start(self.metrics.metrics_port, self.server.host)
                _log.info("metrics at http://%s:%d/metrics", host, port)
            serve(functools.partial(self._make_engine, page), self.server, on_ready=self._report)
        finally:
            page.close()

    def _make_engine(self, page: MetricsEndpoint, on_join: Callable[[Job], None]) -> Engine:
        from widemesh.serving.engine import Engine  # imports jax: only once the ports are ours

        _log.info("loading %s", self.engine.model)
        engine = Engine(self.engine, self.processes, on_join=on_join)
        page.add(engine.metrics)
        # What loading has left stays as long as the process: 680,000 objects with `init-tiny`'s default preset, and
        # all streams would stand still for 0.36 s whenever a full collection looks through them.
        gc.collect()
        gc.freeze()
        return engine

    def _report(self, port: int) -> None:
        name = self.engine.served_model_name or self.engine.model
        print(f"serving {name} on {self.server.host}:{port}", flush=True)
