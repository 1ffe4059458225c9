"""Processes that do not belong together are refused at the start, in one sentence that shows both values."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from widemesh.eplb import EplbConfig
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.config import ConfigError
from widemesh.serving.agreement import step_schema
from widemesh.serving.config import EngineConfig
from widemesh.serving.digests import job_digests
from widemesh.serving.job import Job
from widemesh.serving.process_config import ProcessConfig
from widemesh.sharding.ticket import LocalTicket
from widemesh.tools.cli import main


def join(port: int, rank: int, digests: dict[str, str], *, size: int = 2, most_loads: int = 4) -> str:
    """How a process is refused; empty if it is not."""
    place = ProcessConfig(
        coordinator=f"127.0.0.1:{port}", num_processes=size, process_id=rank, join_timeout_s=5.0
    )
    try:
        Job.join(place, step_schema(most_loads), digests, timeout_s=5.0).leave("the test is over")
    except ConfigError as err:
        return str(err)
    return ""


def meet(port: int, *each: dict[str, Any]) -> list[str]:
    """The refusals of processes that come together, by rank."""
    with ThreadPoolExecutor(len(each)) as pool:
        return list(pool.map(lambda item: join(port, item[0], **item[1]), enumerate(each)))


def test_a_single_process_is_alone_whatever_coordinator_is_named(new_port) -> None:
    """Nobody is to be told when it fails, so it stays up to say so."""
    place = ProcessConfig(coordinator=f"127.0.0.1:{new_port()}", num_processes=1, process_id=0)
    job = Job.join(place, step_schema(4), {}, timeout_s=5.0)
    job.fail(RuntimeError("a defect"))
    job.leave("the end")
    assert job.end is None and isinstance(job.ticket, LocalTicket)


@pytest.mark.parametrize("closed", ["", "import os; os.close(1); os.close(2)", "sys.stdout.close(); sys.stderr.close()",
                                    "sys.stdout = sys.stderr = None"])  # fmt: skip
def test_an_end_is_an_end_without_streams(closed: str) -> None:
    lines = ("import sys, time", "from widemesh.serving.job import exit_after", closed, "exit_after(0.1, 70)",
             "time.sleep(60)")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], timeout=30, check=False).returncode == 70


@pytest.fixture
def config(folder: Path, settings: dict[str, Any]) -> EngineConfig:
    return EngineConfig(model=str(folder), **settings)


def digests(config: EngineConfig) -> dict[str, str]:
    return job_digests(config, Checkpoint.open(config.model))


def test_the_same_everywhere_is_taken(config: EngineConfig, new_port) -> None:
    """Also where a process has other names and other limits of its own."""
    other = dataclasses.replace(config, served_model_name="b", seed=3, max_num_queued_reqs=7)
    assert meet(new_port(), {"digests": digests(config)}, {"digests": digests(other)}) == ["", ""]


@pytest.mark.parametrize(
    ("field", "value"), [("max_num_seqs", 8), ("numerics", "kvq"), ("replay_tail", "bounded"), ("page_size", 8)]
)
def test_another_setting(config: EngineConfig, field: str, value: object, new_port) -> None:
    other = dataclasses.replace(config, **{field: value})  # type: ignore[arg-type]
    for said in meet(new_port(), {"digests": digests(config)}, {"digests": digests(other)}):
        assert f"{field}={getattr(config, field)}" in said.replace("'", "")
        assert f"{field}={value}" in said.replace("'", "")


def test_another_setting_of_the_reshuffler(config: EngineConfig, new_port) -> None:
    mine, other = (dataclasses.replace(config, enable_eplb=True, eplb=EplbConfig(window_size=size)) for size in (5, 6))
    assert {name for name, value in digests(mine).items() if digests(other)[name] != value} == {"eplb.window_size"}
    for said in meet(new_port(), {"digests": digests(mine)}, {"digests": digests(other)}):
        assert "eplb.window_size=5" in said.replace("'", "") and "eplb.window_size=6" in said.replace("'", "")


@pytest.mark.parametrize("field", ["expert_placement", "draft_expert_placement"])
def test_a_placement_counts_by_what_it_holds(config: EngineConfig, tmp_path: Path, field: str) -> None:
    config = dataclasses.replace(config, num_speculative_tokens=1)
    for name, content in (("a", "one"), ("b", "one"), ("c", "another")):
        (tmp_path / name).write_text(content)
    first, same, other = (digests(dataclasses.replace(config, **{field: str(tmp_path / name)})) for name in "abc")
    assert first == same
    assert {name for name in first if first[name] != other[name]} == {field}
    assert first[field] != digests(config)[field] == "None"


def test_other_weights_of_the_same_shapes(config: EngineConfig, write_model, tmp_path: Path, new_port) -> None:
    other = dataclasses.replace(config, model=str(write_model(tmp_path / "other", seed=1)))
    mine, others = digests(config), digests(other)
    assert {name for name in mine if mine[name] != others[name]} == {"weights"}
    for said in meet(new_port(), {"digests": mine}, {"digests": others}):
        assert mine["weights"] in said and others["weights"] in said


def test_another_version(config: EngineConfig, new_port) -> None:
    mine = digests(config)
    for said in meet(new_port(), {"digests": mine}, {"digests": mine | {"jax": "0.0.1"}}):
        assert mine["jax"] in said and "0.0.1" in said


def test_another_number_of_processes(new_port) -> None:
    said = meet(new_port(), {"digests": {}}, {"digests": {}, "size": 3})
    assert all("size=3" in one and "size=2" in one for one in said)


def test_nobody_at_the_coordinator(folder: Path, new_port, capsys) -> None:
    """Said in one sentence, before JAX or any weights are loaded."""
    port = new_port()
    assert main(["serve", str(folder), "--port=0", f"--coordinator=127.0.0.1:{port}", "--num-processes=2",
                 "--process-id=1", "--join-timeout-s=0.5"]) == 2  # fmt: skip
    said = capsys.readouterr().err
    assert f"the processes of coordinator=127.0.0.1:{port} cannot start" in said and "Traceback" not in said


def test_a_process_with_another_checkpoint(start, write_model, tmp_path: Path) -> None:
    """Two real ones: both say it and end with status 2."""
    other = write_model(tmp_path / "other", seed=1)
    served = start({}, {"model": other}, awaits=False)
    assert [one.exit_status(60) for one in served] == [2, 2]
    for one in served:
        lines = [line for line in one.log().splitlines() if line.startswith("widemesh: ")]
        assert len(lines) == 1 and "on rank 0 but" in lines[0] and "Traceback" not in one.log()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num-processes=3"], "prefill_devices=2 must be a multiple of num_processes=3; use 3"),
        (["--num-processes=2", "--process-id=2"], "process_id=2 must be from 0 to 1 with num_processes=2"),
        (["--num-processes=2", "--decode-devices=5", "--max-num-seqs=5"],
         "decode_devices=5 must be a multiple of num_processes=2; use 6"),
        (["--num-processes=2", "--tensor-parallel-size=2"],
         "prefill_devices=2 must be a multiple of num_processes=2 * tensor_parallel_size=2; use 4"),
        (["--num-processes=2", "--ticket-timeout-s=90"], "ticket_timeout_s=90 must be between 0.5 and 60; use 5"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_go_together(flags: list[str], said: str, capsys) -> None:
    assert main(["serve", "/there", "--coordinator=127.0.0.1:1", *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("address", ["", "here", "here:", ":70", "here:0", "here:70000", "here:port"])
def test_a_coordinator_that_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address; use HOST:PORT"):
        ProcessConfig(coordinator=address, num_processes=2)


def test_processes_need_a_coordinator() -> None:
    with pytest.raises(ConfigError, match="num_processes=2 need a place to meet; give coordinator=HOST:PORT"):
        ProcessConfig(num_processes=2)
