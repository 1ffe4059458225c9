"""A checkpoint so small that the snippets' engines start in seconds; the documents call its folder `tiny`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from widemesh.model.checkpoint import write_checkpoint
from widemesh.model.presets import TINY_MESH
from widemesh.model.random_weights import random_tensors
from widemesh.model.tiny_tokenizer import tiny_tokenizer

# What `widemesh init-tiny` writes, with two layers instead of ten: one per ratio, Engram and candidates included.
_CONFIG = dataclasses.replace(
    TINY_MESH, num_hidden_layers=2, compress_ratios=(2, 1), kv_source_layer_ids=(0, 1), index_source_layer_ids=(0, 1),
    candidate_source_layer_id=1, engram_layer_ids=(0,), engram_num_embeddings=TINY_MESH.engram_num_embeddings[:1],
    num_nextn_predict_layers=0, dspark_target_layer_ids=(),
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the checkpoint, made once. Do not write into it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    folder.mkdir()
    tokenizer, tokenizer_config = tiny_tokenizer(_CONFIG)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    write_checkpoint(folder, _CONFIG, random_tensors(_CONFIG, 0), form="quantized")
    return folder
