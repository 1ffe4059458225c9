"""A model as small as one with 16 experts, a draft with 8, and every kind of layer can be; it opens fast."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from widemesh.model.checkpoint import write_checkpoint
from widemesh.model.config import ModelConfig
from widemesh.model.presets import TINY_MESH
from widemesh.model.random_weights import random_tensors
from widemesh.model.tiny_tokenizer import tiny_tokenizer

# Layers: 0 window + Engram; 1 source, ratio 2; 2 reuse; 3 source, ratio 1, candidates; 4 re-index; 5-6 draft.
MODEL = dataclasses.replace(
    TINY_MESH, hidden_size=64, moe_intermediate_size=32, num_attention_heads=4, head_dim=32, qk_rope_head_dim=8,
    q_lora_rank=32, o_lora_rank=16, o_groups=2, index_n_heads=2, num_hidden_layers=5,
    compress_ratios=(0, 2, 2, 1, 1, 0, 0), kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3, 4),
    candidate_source_layer_id=3, engram_layer_ids=(0,), engram_num_embeddings=(1618,), num_nextn_predict_layers=2,
    dspark_target_layer_ids=(2, 4), dspark_block_size=3, dspark_markov_rank=8,
)  # fmt: skip
# Two of them and one of the draft's, for tests of which the layers are not the subject.
SHORT_WITH_DRAFT = dataclasses.replace(
    MODEL, num_hidden_layers=2, compress_ratios=(0, 1, 0), kv_source_layer_ids=(1,), index_source_layer_ids=(1,),
    candidate_source_layer_id=1, num_nextn_predict_layers=1, dspark_target_layer_ids=(1,),
)  # fmt: skip
SHORT = dataclasses.replace(
    SHORT_WITH_DRAFT, compress_ratios=(0, 1), num_nextn_predict_layers=0, dspark_target_layer_ids=()
)


def write_model(folder: Path, model: ModelConfig = MODEL, seed: int = 0) -> Path:
    """A checkpoint of it in released form, with its draft; other weights for every seed."""
    tokenizer, tokenizer_config = tiny_tokenizer(model)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    whole = model.with_draft(model.dspark_block_size if model.num_nextn_predict_layers else 0)
    write_checkpoint(folder, whole, random_tensors(whole, seed), form="quantized")
    return folder
