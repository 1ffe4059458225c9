"""`widemesh bench ticket`: what it counts, and what it refuses."""

import json
import subprocess

import pytest

from widemesh.model.config import ConfigError
from widemesh.tools.bench.ticket import TicketBench


def test_last_line_has_a_row_for_each_number_of_processes(capsys):
    TicketBench(processes="2", exchanges=5, step_ms=1.0).run()
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (row["processes"], row["rounds"], row["messages"]) == (2, 1, 2)
    assert min(row["us_ticket"], row["us_gloo"], row["us_wait_after_step"]) > 0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"processes": "8,x"}, "processes='8,x' must be numbers from 2 to 64; use for example 8,16"),
        ({"processes": "1"}, "processes='1' must be"),
        ({"exchanges": 0}, "exchanges=0 must be at least 1"),
        ({"step_ms": -1.0}, "step_ms=-1.0 must be at least 0"),
    ],
)
def test_bad_values_are_one_sentence(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        TicketBench(**fields)


def test_ranks_that_have_started_end_when_another_cannot(monkeypatch):
    started = []

    class Rank:
        def __init__(self, *args, **kwargs):
            if len(started) == 2:
                raise OSError("no more processes")
            started.append(self)
            self.done = []

        def kill(self):
            self.done.append("kill")

        def wait(self):
            self.done.append("wait")

    monkeypatch.setattr(subprocess, "Popen", Rank)
    with pytest.raises(OSError, match="no more processes"):
        TicketBench()._measure("ticket", 3)
    assert [rank.done for rank in started] == [["kill", "wait"]] * 2
