"""The models of the tests of mesh shapes, their checkpoints, and engines over them of any shape.

As a program, for processes with more virtual devices than the tests have,

    python mesh_models.py FOLDER '[[ep, tp, prefill devices], ...]'

prints the tokens of every shape for `requests()`, as one JSON list.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

from widemesh.model.checkpoint import write_checkpoint
from widemesh.model.presets import PRESETS, TINY_MESH
from widemesh.model.random_weights import random_tensors
from widemesh.model.tiny_tokenizer import tiny_tokenizer
from widemesh.serving import Engine, EngineConfig, SamplingParams

# Every kind of layer once. Layers: 0 window + Engram; 1 source, ratio 2; 2 reuse; 3 source, ratio 1, candidates;
# 4 re-index.
SMALL = dataclasses.replace(
    TINY_MESH, num_hidden_layers=5, compress_ratios=(0, 2, 2, 1, 1), kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 4), candidate_source_layer_id=3, engram_layer_ids=(0,), engram_num_embeddings=(1618,),
    num_nextn_predict_layers=0, dspark_target_layer_ids=(),
)  # fmt: skip
MODELS = {"small": SMALL, "tiny-mesh": PRESETS["tiny-mesh"]}


def write_model(folder: Path, name: str) -> Path:
    """A checkpoint of one of `MODELS`, in released form."""
    config = MODELS[name]
    tokenizer, tokenizer_config = tiny_tokenizer(config)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    write_checkpoint(folder, config, random_tensors(config, 0), form="quantized")
    return folder


def requests() -> tuple[list[np.ndarray], list[SamplingParams]]:
    """Prompts of uneven lengths, and settings no two of which are alike."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 500, length).astype(np.int32) for length in (1, 20, 5, 17, 9)]
    settings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.2, seed=1, top_k=3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, seed=2, top_p=0.6),
        SamplingParams(temperature=1.0, seed=3, min_p=0.05, top_k=40),
    ]
    return prompts, [dataclasses.replace(one, max_tokens=9, ignore_eos=True) for one in settings]


def generate(
    folder: Path, *, ep: int, tp: int, prefill_devices: int, decode_steps: int = 2, exact: bool = True
) -> list[list[int]]:
    """Tokens of `requests()`, in order; chunks of 16 rows. Nothing may compile after the warm-up."""
    config = EngineConfig(
        model=str(folder), numerics="plain", max_model_len=32, max_num_seqs=max(4, ep), page_size=4,
        max_num_batched_tokens=16 * (prefill_devices // tp), replay_prefix="exact" if exact else "bounded",
        replay_tail="full" if exact else "bounded",
        prefill_devices=prefill_devices, decode_devices=ep * tp, tensor_parallel_size=tp, decode_steps=decode_steps,
    )  # fmt: skip
    with Engine(config) as engine:
        assert engine.meshes.decode.devices.shape == (ep, tp)
        assert engine.meshes.prefill.devices.shape == (prefill_devices // tp, tp)
        done = engine.generate(*requests())
        assert engine.metrics._compiles.after_warm_up == 0
        return [one.token_ids.tolist() for one in done]


if __name__ == "__main__":
    found = []
    for shape in json.loads(sys.argv[2]):
        found.append(generate(Path(sys.argv[1]), ep=shape[0], tp=shape[1], prefill_devices=shape[2]))
        print(f"{shape} has run", file=sys.stderr, flush=True)
    print(json.dumps(found))
