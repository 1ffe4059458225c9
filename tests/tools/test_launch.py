"""`widemesh launch`: what each process is given, and the whole command with a stand-in for `widemesh serve`."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from widemesh.model.config import ConfigError
from widemesh.serving.job import END_SENTENCE, Job, JobEnd
from widemesh.sharding.ticket import Field, TicketSchema
from widemesh.tools.cli import main
from widemesh.tools.launch import Launch, without


def parse(*args: str) -> Launch:
    return Launch.parse("widemesh launch", args)


def given(command: Sequence[str], name: str) -> list[str]:
    """Every value that a command gives to a flag."""
    return [command[i + 1] for i, word in enumerate(command) if word == f"--{name}"]


def test_each_process_gets_its_rank_and_its_ports() -> None:
    launch = parse("/there", "--num-processes", "2", "--port", "7000", "--metrics_port=8000", "--max-num-seqs", "16",
                   "--join-timeout-s", "9")  # fmt: skip
    ranks = launch.ranks("127.0.0.1:4000", {"PATH": "/bin"}, serve=("stand-in", "serve"))
    assert len(ranks) == 2
    for i, rank in enumerate(ranks):
        assert rank.command[:3] == ["stand-in", "serve", "/there"]
        assert given(rank.command, "max-num-seqs") == ["16"] and given(rank.command, "join-timeout-s") == ["9"]
        assert given(rank.command, "coordinator") == ["127.0.0.1:4000"]
        assert given(rank.command, "num-processes") == ["2"]
        assert given(rank.command, "process-id") == [str(i)]
        assert given(rank.command, "port") == [str(7000 + i)]
        assert given(rank.command, "metrics-port") == [str(8000 + i)]
        assert rank.env["PATH"] == "/bin"


def test_ports_are_any_or_left_out_as_given() -> None:
    for rank in parse("/there", "--num-processes=2", "--port=0").ranks("h:1", {}):
        assert given(rank.command, "port") == ["0"] and given(rank.command, "metrics-port") == []


def test_the_file_counts_where_no_flag_is_given(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("model: /there\nprefill-devices: 4\ndecode-devices: 8\nport: 7000\nmetrics-port: 8000\n")
    launch = parse("--num-processes", "4", "--config", str(settings), "--port", "7100")
    last = launch.ranks("h:1", {})[3]
    assert given(last.command, "port") == ["7103"] and given(last.command, "metrics-port") == ["8003"]
    assert given(last.command, "config") == [str(settings)] and "/there" not in last.command
    assert last.env["XLA_FLAGS"] == "--xla_force_host_platform_device_count=3"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "--xla_force_host_platform_device_count=3"),
        ("--xla_other=1", "--xla_other=1 --xla_force_host_platform_device_count=3"),
        ("--xla_force_host_platform_device_count=9", "--xla_force_host_platform_device_count=9"),
    ],
)
def test_each_process_asks_for_its_own_virtual_devices(before: str, after: str) -> None:
    ranks = parse("/there", "--num-processes", "2").ranks("h:1", {"XLA_FLAGS": before})
    assert [rank.env["XLA_FLAGS"] for rank in ranks] == [after, after]


def test_visible_gpus_are_shared_out() -> None:
    launch = parse("/there", "--num-processes", "2")
    ranks = launch.ranks("h:1", {"CUDA_VISIBLE_DEVICES": "0,2,5,7"})
    assert [rank.env["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0,2", "5,7"]
    assert "CUDA_VISIBLE_DEVICES" not in launch.ranks("h:1", {})[0].env
    with pytest.raises(ConfigError, match=r"^CUDA_VISIBLE_DEVICES=0,1,2 cannot be shared by num_processes=2; name a"):
        launch.ranks("h:1", {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    hidden = launch.ranks("h:1", {"CUDA_VISIBLE_DEVICES": "-1"})
    assert [rank.env["CUDA_VISIBLE_DEVICES"] for rank in hidden] == ["-1", "-1"]


def test_all_gpus_of_a_machine_are_shared_out_when_none_is_named(tmp_path, monkeypatch) -> None:
    for bus in ("0000:03:00.0", "0000:04:00.0"):
        (tmp_path / bus).mkdir()
    monkeypatch.setattr("widemesh.tools.launch._DRIVER", tmp_path)
    ranks = parse("/there", "--num-processes", "2").ranks("h:1", {})
    assert [rank.env["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0", "1"]


@pytest.mark.parametrize("args", [["--port", "1", "d", "--x"], ["--port=1", "d", "--x"], ["d", "--x", "--port", "1"]])
def test_flags_are_taken_out_whole(args: list[str]) -> None:
    assert list(without(("port", "num-processes"), [*args, "--num_processes=3", "--portly", "2"])) == [
        "d", "--x", "--portly", "2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--num-processes", "2"], "the checkpoint folder is missing; use `widemesh launch DIR --num-processes N`"),
        (["d", "--num-processes", "0"], "num_processes=0 must be at least 1; use 1 or more"),
        (["d", "--num-processes", "4"], "prefill_devices=2 cannot be shared by num_processes=4; use a multiple of it"),
        (["d", "--num-processes", "2", "--decode-devices", "1"], "decode_devices=1 cannot be shared by "),
        (["d", "--num-processes", "2", "--port", "65535"],
         "port=65535 leaves no port for each of num_processes=2; use at most 65534"),
        (["d", "--num-processes", "2", "--port", "7000", "--metrics-port", "7001"],
         "metrics_port=7001 lies too near port=7000: each process has both; use 7002 or more"),
        (["d", "--num-processes", "2", "--join-timeout-s", "0"], "join_timeout_s=0 must be above 0; use 60"),
        (["d", "--num-processes", "2", "--coordinator-port", "-1"], "coordinator_port=-1 must be between 0 and 65535"),
        (["d", "--num-processes", "2", "--max-num-seqs", "3"], "max_num_seqs=3 must be a multiple of decode_devices=4"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"widemesh: {sentence}") and err.count("\n") == 1


STAND_IN = r"""
import os, signal, sys, time
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
os.write(1, f"serving {sys.argv[1]} on {flags['--port']}, one of {flags['--num-processes']}\n".encode())
if sys.argv[1] == "/lost":
    if flags["--process-id"] == "1":
        time.sleep(0.5)  # the one that has failed ends last
    rank = flags["--process-id"]
    said = f"12:00:00 ERROR x: rank 1 has failed (ValueError: 7); this process, rank {rank}, ends with status 70\n"
    os.write(2, said.encode())
    os._exit(70)
if sys.argv[1] == "/broken" and flags["--process-id"] == "1":
    sys.exit(70)
time.sleep(60)
"""
PROGRAM = f"""
import sys
from widemesh.tools import launch
launch.SERVE = (sys.executable, "-S", "-c", {STAND_IN!r})
from widemesh.tools.cli import main
sys.exit(main(sys.argv[1:]))
"""


def start(folder: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, "launch", folder, "--num-processes", "2", "--port", "7000"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_serves_until_it_is_told_to_stop() -> None:
    with start("/there") as process:
        assert process.stdout is not None
        lines = sorted(process.stdout.readline() for _ in range(2))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert lines == [f"[rank {i}] serving /there on {7000 + i}, one of 2\n" for i in range(2)]
    assert (process.returncode, out, err) == (0, "", "")


def test_a_rank_that_fails_is_named() -> None:
    with start("/broken") as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 70
    assert err == "widemesh launch: rank 1 has ended with status 70; stopping the others\n"


def test_the_rank_that_the_job_blames_is_named() -> None:
    """Though another one ends first."""
    with start("/lost") as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 70
    said = "widemesh launch: the job has ended with status 70: rank 1 has failed (ValueError: 7); stopping the others"
    assert said in err.splitlines()


def test_the_sentence_of_a_job_is_found(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is logged, not as a copy of it has it."""
    monkeypatch.setattr("widemesh.serving.job.exit_after", lambda *_: None)
    job = Job.alone(TicketSchema((Field("a", "max"),)))
    job._finish(JobEnd(reason="rank 3 is gone: its connection was closed", is_failure=True, is_others=True))
    found = END_SENTENCE.search(f"12:00:00 ERROR widemesh.serving.job: {caplog.messages[-1]}")
    assert found is not None and found["reason"] == "rank 3 is gone: its connection was closed"
