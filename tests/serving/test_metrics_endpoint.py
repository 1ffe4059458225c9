"""The metrics page over HTTP."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import Gauge

from widemesh.model.config import ConfigError
from widemesh.serving.metrics_endpoint import MetricsConfig, MetricsEndpoint


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint()
    yield endpoint
    endpoint.close()


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert answer.status == 200
        return answer.read().decode()


def test_shows_what_is_added_while_it_runs(endpoint: MetricsEndpoint) -> None:
    port = endpoint.start(0)
    assert port > 0
    assert read(port) == ""
    gauge = Gauge("test:depth", "A number.", registry=None)
    endpoint.add(gauge)
    gauge.set(4)
    assert "\ntest:depth 4.0\n" in read(port)


def test_endpoints_share_nothing(endpoint: MetricsEndpoint) -> None:
    """Neither with each other nor with the process's own registry, which holds python_info and the like."""
    other = MetricsEndpoint()
    gauge = Gauge("test:depth", "A number.", registry=None)
    endpoint.add(gauge)
    other.add(gauge)
    try:
        page = read(endpoint.start(0))
        assert page == read(other.start(0)) == "# HELP test:depth A number.\n# TYPE test:depth gauge\ntest:depth 0.0\n"
    finally:
        other.close()


def test_a_taken_port_is_one_sentence(endpoint: MetricsEndpoint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^metrics_port={port} on host=127\.0\.0\.1 cannot be listened on "
                           r"\(Address already in use\); choose another with --metrics-port or --host$"):  # fmt: skip
            endpoint.start(port)


def test_a_second_endpoint_does_not_share_the_port(endpoint: MetricsEndpoint) -> None:
    port = endpoint.start(0)
    with pytest.raises(ConfigError, match=rf"metrics_port={port} .*\(Address already in use\)"):
        MetricsEndpoint().start(port)


def test_a_host_that_does_not_exist_is_one_sentence(endpoint: MetricsEndpoint) -> None:
    with pytest.raises(ConfigError, match=r"metrics_port=0 on host=no\.such\.host\.invalid cannot be listened on"):
        endpoint.start(0, "no.such.host.invalid")


def test_close_frees_the_port_and_may_be_repeated(endpoint: MetricsEndpoint) -> None:
    endpoint.close()
    port = endpoint.start(0)
    endpoint.close()
    endpoint.close()
    with pytest.raises(urllib.error.URLError):
        read(port)
    assert endpoint.start(port) == port


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"metrics_port={port} must be between 0 and 65535; use 9090"):
        MetricsConfig(metrics_port=port)
