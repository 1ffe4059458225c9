"""`widemesh serve DIR`: a checkpoint behind the gRPC service, until SIGINT or SIGTERM."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from widemesh.model.config import ConfigError
from widemesh.serving.config import EngineConfig
from widemesh.serving.grpc.server import ServerConfig, serve
from widemesh.tools.settings import as_flags, find_config, read_settings

if TYPE_CHECKING:
    from widemesh.serving.engine import Engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFlags(EngineConfig):
    """The engine's settings, with the checkpoint folder as the one positional argument."""

    model: tyro.conf.Positional[str] = ""  # checkpoint folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a checkpoint folder over gRPC (vllm.grpc.engine.VllmEngine)."""

    engine: tyro.conf.OmitArgPrefixes[EngineFlags]
    server: tyro.conf.OmitArgPrefixes[ServerConfig]
    config: Path | None = None  # YAML file of these settings; flags override it

    @classmethod
    def parse(cls, prog: str, args: Sequence[str]) -> Serve:
        """Read flags and the file of `--config`. Raises ConfigError; exits with status 2 on wrong flags."""
        path = find_config(args)
        settings = {} if path is None else read_settings(path, (EngineFlags, ServerConfig))
        model = settings.pop("model", "")
        parsed = tyro.cli(cls, prog=prog, args=[*args, *as_flags(settings, args)])
        if not parsed.engine.model:
            parsed = dataclasses.replace(parsed, engine=dataclasses.replace(parsed.engine, model=str(model or "")))
        if not parsed.engine.model:
            raise ConfigError(f"the checkpoint folder is missing; use `{prog} DIR`")
        return parsed

    def run(self) -> None:
        log_to_stderr()
        serve(self._make_engine, self.server, on_ready=self._report)

    def _make_engine(self) -> Engine:
        from widemesh.serving.engine import Engine  # imports jax: only once the port is ours

        logging.getLogger(__name__).info("loading %s", self.engine.model)
        return Engine(self.engine)

    def _report(self, port: int) -> None:
        name = self.engine.served_model_name or self.engine.model
        print(f"serving {name} on {self.server.host}:{port}", flush=True)


def log_to_stderr() -> None:
    """The project's own log from INFO on, everybody else's warnings."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("widemesh").setLevel(logging.INFO)
