"""`widemesh launch DIR --num-processes N`: a server of several processes on one machine."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from widemesh.model.config import ConfigError
from widemesh.serving.grpc.server import EXIT_S, ServerConfig
from widemesh.serving.job import END_SENTENCE
from widemesh.serving.metrics_endpoint import MetricsConfig
from widemesh.serving.process_config import ProcessConfig
from widemesh.sharding.ticket.addresses import free_port
from widemesh.tools.rank_processes import Rank, run_ranks
from widemesh.tools.serve import EngineFlags
from widemesh.tools.settings import parse_with_file

SERVE = (sys.executable, "-m", "widemesh.tools.cli", "serve")
_CPU_DEVICES = "--xla_force_host_platform_device_count"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_NO_GPUS = ("-1", "NoDevFiles")  # values of it that hide all GPUs
_DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU
_STOP_S = 2 * EXIT_S  # a server ends itself within EXIT_S of a signal; a loaded machine may take longer
_HOST = "127.0.0.1"  # where the processes meet
# Flags that servers are not given as they stand.
_OWN_FLAGS = ("num-processes", "coordinator-port", "port", "metrics-port")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """Start the processes of one server on this machine and stop them together; takes the flags of `widemesh serve`.

    Process I listens on `port` + I, its metrics on `metrics_port` + I, and every line it logs begins with `[rank I]`.
    `prefill_devices` and `decode_devices` are totals, of which each process holds an equal part.
    """

    engine: Annotated[EngineFlags, tyro.conf.arg(name="")]
    server: tyro.conf.OmitArgPrefixes[ServerConfig]
    metrics: tyro.conf.OmitArgPrefixes[MetricsConfig]
    num_processes: int  # how many to start
    coordinator_port: int = 0  # where they meet, on this machine; 0: any free port
    join_timeout_s: float = ProcessConfig.join_timeout_s  # seconds that they wait for each other at the start
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None  # YAML file of serve's settings; flags win
    handed_on: tyro.conf.Suppress[tuple[str, ...]] = ()  # the flags as they were given, for the servers

    def __post_init__(self) -> None:
        count, server, metrics = self.num_processes, self.server, self.metrics
        ProcessConfig(coordinator=f"{_HOST}:1", num_processes=count, join_timeout_s=self.join_timeout_s)  # checks them
        if not 0 <= self.coordinator_port <= 65535:
            raise ConfigError(f"coordinator_port={self.coordinator_port} must be between 0 and 65535; leave it out")
        for name in ("prefill_devices", "decode_devices"):
            devices = getattr(self.engine, name)
            if devices % count:
                raise ConfigError(f"{name}={devices} cannot be shared by num_processes={count}; use a multiple of it")
        for name, port in (("port", server.port), ("metrics_port", metrics.metrics_port)):
            if port is not None and port + count - 1 > 65535:
                raise ConfigError(f"{name}={port} leaves no port for each of num_processes={count}; "
                                  f"use at most {65536 - count}")  # fmt: skip
        if server.port and metrics.metrics_port and abs(server.port - metrics.metrics_port) < count:
            raise ConfigError(f"metrics_port={metrics.metrics_port} lies too near port={server.port}: each process has "
                              f"both; use {server.port + count} or more")  # fmt: skip

    @classmethod
    def parse(cls, prog: str, args: Sequence[str]) -> Launch:
        """Read flags and the file of `--config`. Raises ConfigError; exits with status 2 on wrong flags."""
        parsed = parse_with_file(cls, prog, args, (EngineFlags, ServerConfig, MetricsConfig, ProcessConfig))
        if not parsed.engine.model:
            raise ConfigError(f"the checkpoint folder is missing; use `{prog} DIR --num-processes N`")
        return dataclasses.replace(parsed, handed_on=tuple(without(_OWN_FLAGS, args)))

    def run(self) -> int:
        coordinator = f"{_HOST}:{self.coordinator_port or free_port()}"
        ranks = self.ranks(coordinator, os.environ, SERVE)
        return run_ranks(ranks, stop_s=_STOP_S, say=_say, end_sentence=END_SENTENCE)

    def ranks(self, coordinator: str, env: Mapping[str, str], serve: Sequence[str] = SERVE) -> list[Rank]:
        """What to run for each process; `serve` is the command that takes the flags of `widemesh serve`.

        Raises ConfigError if the GPUs that `env` names cannot be shared out.
        """
        count = self.num_processes
        ports = {"port": self.server.port, "metrics-port": self.metrics.metrics_port}
        gpus = _shares(env.get(_VISIBLE_GPUS, ",".join(_present_gpus())), count)
        devices = (self.engine.prefill_devices + self.engine.decode_devices) // count
        xla_flags = env.get("XLA_FLAGS", "")
        if _CPU_DEVICES not in xla_flags:
            xla_flags = f"{xla_flags} {_CPU_DEVICES}={devices}".strip()
        found = []
        for rank in range(count):
            command = [*serve, *self.handed_on, "--coordinator", coordinator, "--num-processes", str(count)]
            command += ["--process-id", str(rank)]
            for name, port in ports.items():
                if port is not None:
                    command += [f"--{name}", str(port + rank if port else 0)]
            share = {_VISIBLE_GPUS: gpus[rank]} if gpus else {}
            found.append(Rank(command=command, env={**env, "XLA_FLAGS": xla_flags, "PYTHONUNBUFFERED": "1", **share}))
        return found


def without(names: Sequence[str], args: Sequence[str]) -> Iterator[str]:
    """`args` without the flags of these names and their values, in whichever form they were given."""
    rest = iter(args)
    for arg in rest:
        flag, equals, _ = arg.partition("=")
        if flag.replace("_", "-") not in {f"--{name}" for name in names}:
            yield arg
        elif not equals:
            next(rest, None)


def _present_gpus() -> list[str]:
    """Indices of the GPUs that the driver shows; without a share each process would take the first ones for itself."""
    folders = list(_DRIVER.iterdir()) if _DRIVER.is_dir() else []
    return [str(index) for index in range(len(folders))]


def _shares(gpus: str, count: int) -> list[str]:
    """The visible GPUs in equal parts, none if the environment names none. Raises ConfigError if they are uneven."""
    names = [name for name in gpus.split(",") if name.strip()]
    if names and names[0].strip() in _NO_GPUS:
        return []
    if len(names) % count:
        raise ConfigError(f"{_VISIBLE_GPUS}={gpus} cannot be shared by num_processes={count}; name a multiple of it")
    size = len(names) // count
    return [",".join(names[rank * size : (rank + 1) * size]) for rank in range(count)] if names else []


def _say(sentence: str) -> None:
    print(f"widemesh launch: {sentence}", file=sys.stderr, flush=True)
