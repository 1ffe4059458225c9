"""Several processes with drafts serve as one engine, while slots of each of them keep many drafts, few or none."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from widemesh.model.checkpoint import write_checkpoint
from widemesh.model.presets import TINY_MESH
from widemesh.model.random_weights import random_tensors
from widemesh.model.tiny_tokenizer import tiny_tokenizer
from widemesh.serving import Engine, EngineConfig, SamplingParams

Ask = Callable[..., Iterator[Any]]

DRAFTED = 17  # what the draft always proposes
# A window layer with Engram, one that stores keys, and one of the draft: each process compiles them.
MODEL = dataclasses.replace(
    TINY_MESH, num_hidden_layers=2, compress_ratios=(0, 1, 0), kv_source_layer_ids=(1,), index_source_layer_ids=(1,),
    candidate_source_layer_id=1, engram_layer_ids=(0,), engram_num_embeddings=(1618,), num_nextn_predict_layers=1,
    dspark_target_layer_ids=(0, 1), num_speculative_tokens=3,
)  # fmt: skip
# Requests that draw the drafted token nearly always, often, seldom and never.
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1, "max_tokens": 14, "logit_bias": {DRAFTED: 12.0}},
    {"temperature": 0.0, "max_tokens": 9},
    {"temperature": 1.0, "seed": 2, "max_tokens": 20, "logit_bias": {DRAFTED: 6.0}},
    {"temperature": 0.8, "seed": 3, "max_tokens": 12, "logit_bias": {DRAFTED: 5.0}, "frequency_penalty": 0.4},
    {"temperature": 1.0, "seed": 4, "max_tokens": 16, "logit_bias": {DRAFTED: 7.0}, "top_k": 20},
    {"temperature": 0.0, "max_tokens": 11, "logit_bias": {DRAFTED: 100.0}},
    {"temperature": 1.2, "seed": 5, "max_tokens": 8},
    {"temperature": 1.0, "seed": 6, "max_tokens": 18, "logit_bias": {DRAFTED: 6.5}, "presence_penalty": 0.3},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, but for the chain over the draft's rows: it outweighs all else and leads to one token."""
    path = tmp_path_factory.mktemp("drafting")
    tokenizer, tokenizer_config = tiny_tokenizer(MODEL)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    tensors = dict(random_tensors(MODEL, 0))
    chain = tensors["mtp.0.markov_head.embed.weight"], tensors["mtp.0.markov_head.head.weight"]
    chain[0][:], chain[1][:], chain[1][DRAFTED] = 1.0, 0.0, 10.0
    write_checkpoint(path, MODEL, tensors.items(), form="quantized")
    return path


@pytest.mark.slow  # both processes compile all programs: a minute on a loaded machine
def test_tokens_are_those_of_one_process(
    run_job: Callable[..., Any], ask: Ask, model: Path, settings: dict[str, Any], prompts: list[np.ndarray]
) -> None:
    wanted = {}
    for drafts in (0, 3):
        with Engine(EngineConfig(model=str(model), num_speculative_tokens=drafts, **settings)) as engine:
            sampling = [SamplingParams(ignore_eos=True, **one) for one in SAMPLING]
            wanted[drafts] = [one.token_ids.tolist() for one in engine.generate(list(prompts), sampling)]
            figures = engine.metrics.speculation
    assert wanted[0] == wanted[3]
    assert (figures.accepted > 0).all() and figures.accepted_tokens < figures.tried_tokens / 2

    def one(place: tuple[int, int]) -> list[int]:
        port, i = place
        answer = ask(port, prompts[i].tolist(), **SAMPLING[i])
        return [token for message in answer for token in message.chunk.token_ids]

    own = {"model": model, "num_speculative_tokens": 3}
    with run_job(own, own) as served:
        for places in ("01010101", "11110111", "00000000"):
            ports = [served[int(place)].port for place in places]
            with ThreadPoolExecutor(len(ports)) as pool:
                assert list(pool.map(one, zip(ports, range(len(ports)), strict=True))) == wanted[0]
