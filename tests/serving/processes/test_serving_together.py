"""Several processes serve as one engine: tokens are those of a single one, whoever has work and whoever has none."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from widemesh.model.forward import ForwardModel
from widemesh.model.numerics import NUMERICS
from widemesh.serving import Engine, EngineConfig, SamplingParams

Ask = Callable[..., Iterator[Any]]

# Distinct in every request, so that a setting which lands in another slot, or on another rank, shows.
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 12},
    {"temperature": 1.2, "seed": 1, "top_k": 3, "max_tokens": 9},
    {"temperature": 0.0, "max_tokens": 16, "repetition_penalty": 1.3},
    {"temperature": 0.7, "seed": 2, "top_p": 0.6, "max_tokens": 5},
    {"temperature": 1.0, "seed": 3, "min_p": 0.05, "top_k": 40, "max_tokens": 14, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 4, "max_tokens": 7, "logit_bias": {17: 4.0}},
    {"temperature": 0.0, "max_tokens": 1},
    {"temperature": 1.1, "seed": 5, "max_tokens": 11, "presence_penalty": 0.4},
]


@pytest.fixture(scope="module")
def wanted(folder: Path, settings: dict[str, Any], prompts: list[np.ndarray]) -> list[list[int]]:
    """What one process that drives all devices answers."""
    sampling = [SamplingParams(ignore_eos=True, **one) for one in SAMPLING]
    with Engine(EngineConfig(model=str(folder), **settings)) as engine:
        return [done.token_ids.tolist() for done in engine.generate(list(prompts), sampling)]


@pytest.fixture(scope="module")
def job(run_job) -> Iterator[list[Any]]:
    """Two processes; tests leave them idle."""
    with run_job({}, {}) as served:
        yield served


def answers(ask: Ask, work: list[tuple[int, np.ndarray, dict[str, Any]]]) -> list[list[int]]:
    """Tokens of requests that are all sent together, each to its port."""

    def one(port: int, prompt: np.ndarray, sampling: dict[str, Any]) -> list[int]:
        return [token for message in ask(port, prompt.tolist(), **sampling) for token in message.chunk.token_ids]

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(lambda item: one(*item), work))


# Which process takes each request: uneven, all on one while the other is idle, and by turns.
@pytest.mark.parametrize("places", ["01111111", "00000000", "11111111", "01010101"])
def test_tokens_are_those_of_one_process(job, ask, prompts, wanted, places: str) -> None:
    ports = [job[int(place)].port for place in places]
    assert answers(ask, list(zip(ports, prompts, SAMPLING, strict=True))) == wanted


def test_waves(job, ask, prompts, wanted) -> None:
    """Requests that come one by one, to one process or the other, each after all have gone to rest."""
    for i, rank in enumerate((1, 0, 0, 1, 1, 0)):
        time.sleep(0.1 * (i % 3))
        assert answers(ask, [(job[rank].port, prompts[i], SAMPLING[i])]) == [wanted[i]]


def test_nothing_runs_while_idle(job) -> None:
    time.sleep(0.5)
    before = [one.cpu_s() for one in job]
    time.sleep(2)
    assert all(one.cpu_s() - then < 0.2 for one, then in zip(job, before, strict=True))


def test_longest_request_beside_short_ones(job, ask, prompts, settings) -> None:
    """One process is at the end of its room, with nothing left to write, while the other goes on."""
    limit = settings["max_model_len"]
    full = np.resize(prompts[5], limit - 1)
    counts = [(1, full, 1), (0, prompts[1], 20), (0, prompts[2], 25)]
    work = [(job[rank].port, prompt, {"max_tokens": count}) for rank, prompt, count in counts]
    assert [len(tokens) for tokens in answers(ask, work)] == [1, 20, 25]


def check_logprobs(ask: Ask, asked: list[tuple[int, np.ndarray]], folder: Path) -> None:
    """What the model says of every token of a prompt, and its 20 likeliest at each place, to 1e-5; all together."""
    model = ForwardModel.load(folder, NUMERICS["plain"])
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: list(ask(one[0], one[1].tolist(), max_tokens=2, prompt_logprobs=20)), asked))
    for (_, prompt), messages in zip(asked, found, strict=True):
        (scores,) = [m.chunk.input_logprobs for m in messages if m.chunk.HasField("input_logprobs")]
        logits = model.logits(prompt)[:-1].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        chosen = np.array([entry.value for entry in scores.token_logprobs[1:]])
        np.testing.assert_allclose(chosen, logprobs[np.arange(len(chosen)), prompt[1:]], rtol=1e-5, atol=1e-5)
        for top, row in zip(scores.top_logprobs[1:], logprobs, strict=True):
            assert len(top.values) == 20
            np.testing.assert_allclose(top.values, np.sort(row)[::-1][:20], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(top.values, row[list(top.token_ids)], rtol=1e-5, atol=1e-5)


def test_logprobs_equal_the_model(job, ask, prompts, folder: Path) -> None:
    """Each process runs it for prompts of its own."""
    check_logprobs(ask, [(job[rank].port, prompts[i]) for rank, i in ((1, 1), (0, 3), (1, 2))], folder)


def test_signal_ends_the_job_in_order(job, ask) -> None:
    """Last: SIGTERM to one process ends streams of both with `abort`, and both processes with 0."""
    streams = [ask(one.port, [5, 6, 7], max_tokens=40) for one in job]
    for stream in streams:
        next(stream)
    job[1].process.send_signal(signal.SIGTERM)
    ends = [list(stream)[-1].complete.finish_reason for stream in streams]
    assert ends == ["abort", "abort"]
    assert [one.exit_status(15) for one in job] == [0, 0]
    assert "rank 1 has ended the job" in job[0].log()
    assert not any("Traceback" in one.log() for one in job)


@pytest.mark.slow
def test_four_processes(run_job, ask, folder: Path, settings, prompts) -> None:
    """Uneven: none on the third, one on the last."""
    wider = settings | {"prefill_devices": 4, "decode_devices": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    sampling = [SamplingParams(ignore_eos=True, **one) for one in SAMPLING]
    with Engine(EngineConfig(model=str(folder), **wider)) as engine:
        wanted = [done.token_ids.tolist() for done in engine.generate(list(prompts), sampling)]
    with run_job(*[wider] * 4) as served:
        ports = [served[int(place)].port for place in "00011310"]
        assert answers(ask, list(zip(ports, prompts, SAMPLING, strict=True))) == wanted
        check_logprobs(ask, [(served[rank].port, prompts[i]) for rank, i in ((3, 1), (0, 3), (1, 2))], folder)
        served[2].process.send_signal(signal.SIGTERM)
        assert [one.exit_status(15) for one in served] == [0, 0, 0, 0]
