"""The page where Prometheus reads the engine's figures: plain HTTP on a port of its own."""

from __future__ import annotations

import dataclasses

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from widemesh.model.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Where metrics are read, at the address of the gRPC server."""

    metrics_port: int | None = None  # of the page /metrics for Prometheus; None: no page, 0: any free port

    def __post_init__(self) -> None:
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ConfigError(f"metrics_port={self.metrics_port} must be between 0 and 65535; use 9090")


class MetricsEndpoint:
    """Serves what was added to it, an empty page before that, from threads of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._close = _nothing

    def add(self, collector: Collector) -> None:
        """Show a collector's metrics from now on."""
        self._registry.register(collector)

    def start(self, port: int, host: str = "127.0.0.1") -> int:
        """Listen; port 0 takes a free one. Returns the port. Raises ConfigError if it cannot be listened on."""
        try:
            server, thread = start_http_server(port, host, self._registry)
        except OSError as err:
            raise ConfigError(f"metrics_port={port} on host={host} cannot be listened on ({err.strerror or err}); "
                              "choose another with --metrics-port or --host") from None

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._close = close
        return server.server_port

    def close(self) -> None:
        """Stop listening. May be called twice, and without `start`."""
        self._close()
        self._close = _nothing


def _nothing() -> None:
    """What there is to close while nothing listens."""
