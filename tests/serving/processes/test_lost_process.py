"""A process that dies, hangs or fails takes its job with it: the others say who, and end with status 70."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from widemesh.serving.agreement import step_schema
from widemesh.serving.grpc.servicer import SERVICE_NAME
from widemesh.serving.job import LOSS_EXIT_S, LOST_STATUS, Job
from widemesh.serving.process_config import ProcessConfig
from widemesh.sharding.ticket import TicketError

RANK = Path(__file__).parent / "psum_rank.py"
TIMEOUT_S = 5.0  # as in psum_rank.py
SLACK_S = 8.0  # of a loaded machine, beyond the stated time


@contextlib.contextmanager
def summing(size: int, port: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks that sum for ever."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONUNBUFFERED": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), f"127.0.0.1:{port}", str(size), str(i)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for i in range(size)
    ]  # fmt: skip
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stderr is not None
            line = next((line for line in rank.stdout if "Gloo" not in line), "")
            assert line == "ready\n", rank.stderr.read()
        yield ranks
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
            rank.kill()
            rank.wait(10)


def statuses(ranks: list[subprocess.Popen[str]], within_s: float) -> tuple[list[int], list[str]]:
    """How they end, all within that time, and what they have logged."""
    deadline_s = time.monotonic() + within_s
    found = [rank.wait(max(0.1, deadline_s - time.monotonic())) for rank in ranks]
    return found, [rank.communicate()[1] for rank in ranks]


@pytest.mark.parametrize(("number", "victim", "size"), [(signal.SIGKILL, 0, 3), (signal.SIGSTOP, 1, 2)])
def test_others_end_with_70_and_name_the_rank(number: signal.Signals, victim: int, size: int, new_port) -> None:
    with summing(size, new_port()) as ranks:
        ranks[victim].send_signal(number)
        left = [rank for i, rank in enumerate(ranks) if i != victim]
        found, logs = statuses(left, TIMEOUT_S + LOSS_EXIT_S + SLACK_S)
        assert found == [LOST_STATUS] * (size - 1), logs
        assert all(f"rank {victim} " in log for log in logs), logs


def test_a_failure_is_told_to_the_others(new_port, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[float, int]] = []
    monkeypatch.setattr("widemesh.serving.job.exit_after", lambda seconds, status: ends.append((seconds, status)))
    coordinator = f"127.0.0.1:{new_port()}"
    places = [ProcessConfig(coordinator=coordinator, num_processes=2, process_id=i) for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        jobs = list(pool.map(lambda place: Job.join(place, step_schema(1), {}, TIMEOUT_S), places))
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    jobs[0].on_end(lambda end: told.put(end.reason))
    jobs[1].fail(ValueError("the moon is full"))
    assert told.get(timeout=10) == jobs[0].failure == "rank 1 has failed (ValueError: the moon is full)"
    assert ends == [(LOSS_EXIT_S, LOST_STATUS)] * 2
    with pytest.raises(TicketError, match="the moon is full"):  # so that its loop ends, if it can
        jobs[0].ticket.sleep()


def test_clients_are_told(start, ask) -> None:
    """Killed while both decode; the survivor answers UNAVAILABLE to its stream, says NOT_SERVING, and ends with 70."""
    first, second = start({"ticket_timeout_s": 3}, {"ticket_timeout_s": 3})
    streams = [ask(one.port, [5, 6, 7], max_tokens=40) for one in (first, second)]
    for stream in streams:
        next(stream)  # it has begun
    with grpc.insecure_channel(f"127.0.0.1:{second.port}") as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=60)
        seen = [next(watch).status]
        first.process.kill()
        with pytest.raises(grpc.RpcError) as error:
            list(streams[1])
        with contextlib.suppress(grpc.RpcError):
            for message in watch:
                seen.append(message.status)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "rank 0" in error.value.details()
    assert second.exit_status(LOSS_EXIT_S + SLACK_S) == LOST_STATUS
    assert "rank 0 " in second.log()
    status = health_pb2.HealthCheckResponse.ServingStatus
    assert seen == [status.SERVING, status.NOT_SERVING]
