"""Every tensor of the text backbone and of its draft, by its released name (docs/model.md, "Checkpoint tensors").

Shapes are logical: a linear is [outputs, inputs] whether its values are stored plain, in FP8 or packed in FP4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from widemesh.model.config import LayerRole, ModelConfig

Kind = Literal["bf16", "f32", "fp8", "fp4", "engram"]

_EXTRA_PREFIXES = ("mtp.", "vision.", "aligner.")
_EXTRA_NAMES = ("image_start", "image_end", "image_newline")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor: its released name, its logical shape, and how the quantised form stores it.

    The plain form stores "f32" in float32 and every other kind in bfloat16. The quantised form stores "fp8" in E4M3
    with a scale per 32 x 32 block, "fp4" in packed E2M1 and "engram" in E4M3 with a scale per row and 32 columns.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind


def tensor_table(config: ModelConfig) -> dict[str, TensorSpec]:
    """Name -> spec of every tensor, in the order of the forward pass, the draft's last. Scales are not listed.

    The draft's are there only if the config has one (`num_speculative_tokens`).
    """
    specs = [TensorSpec("embed.weight", (config.vocab_size, config.hidden_size), "bf16")]
    for role in config.roles:
        prefix = f"layers.{role.layer}"
        if role.has_engram:
            specs.extend(_engram(config, prefix, role.layer))
        specs.extend(_hyper_connection(config, f"{prefix}.hc_attn"))
        specs.extend(_attention(config, prefix, role))
        specs.extend(_hyper_connection(config, f"{prefix}.hc_ffn"))
        specs.extend(_experts(config, prefix))
    specs.append(TensorSpec("norm.weight", (config.hidden_size,), "bf16"))
    specs.append(TensorSpec("head.weight", (config.vocab_size, config.hidden_size), "bf16"))
    for stage, role in enumerate(config.draft_roles):
        specs.extend(_draft_layer(config, stage, role))
    return {spec.name: spec for spec in specs}


def is_recognised_extra(name: str) -> bool:
    """Whether `name` belongs to the draft (mtp.*) or the vision tower: known, but no part of the backbone.

    Those of a draft that is in use are in the table as well.
    """
    return name in _EXTRA_NAMES or name.startswith(_EXTRA_PREFIXES)


def _draft_layer(config: ModelConfig, stage: int, role: LayerRole) -> Iterator[TensorSpec]:
    prefix, hidden, vocab, rank = f"mtp.{stage}", config.hidden_size, config.vocab_size, config.dspark_markov_rank
    if stage == 0:
        yield TensorSpec(
            f"{prefix}.main_proj.weight", (hidden, len(config.dspark_target_layer_ids) * hidden), "fp8"
        )
        yield TensorSpec(f"{prefix}.main_norm.weight", (hidden,), "bf16")
    yield from _hyper_connection(config, f"{prefix}.hc_attn")
    yield from _attention(config, prefix, role)
    yield from _hyper_connection(config, f"{prefix}.hc_ffn")
    yield from _experts(config.of_draft, prefix)
    if stage == len(config.draft_roles) - 1:
        yield TensorSpec(f"{prefix}.norm.weight", (hidden,), "bf16")
        yield TensorSpec(f"{prefix}.markov_head.embed.weight", (vocab, rank), "bf16")
        yield TensorSpec(f"{prefix}.markov_head.head.weight", (vocab, rank), "bf16")
        yield TensorSpec(f"{prefix}.confidence_head.proj.weight", (1, hidden + rank), "bf16")


def _engram(config: ModelConfig, prefix: str, layer: int) -> Iterator[TensorSpec]:
    rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer)]
    streams, hidden = config.hc_mult, config.hidden_size
    looked_up = config.num_engram_columns * config.engram_head_dim
    yield TensorSpec(f"{prefix}.engram.embed.weight", (rows, config.engram_head_dim), "engram")
    yield TensorSpec(f"{prefix}.engram.wkv.weight", ((streams + 1) * hidden, looked_up), "fp8")
    yield TensorSpec(f"{prefix}.engram.q_weight", (streams, hidden), "bf16")
    yield TensorSpec(f"{prefix}.engram.k_weight", (streams, hidden), "bf16")


def _hyper_connection(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    streams = config.hc_mult
    coefficients = streams * (streams + 2)
    yield TensorSpec(f"{prefix}_fn", (coefficients, streams * config.hidden_size), "f32")
    yield TensorSpec(f"{prefix}_base", (coefficients,), "f32")
    yield TensorSpec(f"{prefix}_scale", (3,), "f32")


def _attention(config: ModelConfig, prefix: str, role: LayerRole) -> Iterator[TensorSpec]:
    hidden, head_dim, rank = config.hidden_size, config.head_dim, config.q_lora_rank
    heads_width = config.num_attention_heads * head_dim
    grouped = config.o_groups * config.o_lora_rank
    yield TensorSpec(f"{prefix}.attn_norm.weight", (hidden,), "bf16")
    attn = f"{prefix}.attn"
    yield TensorSpec(f"{attn}.wq_a.weight", (rank, hidden), "fp8")
    yield TensorSpec(f"{attn}.q_norm.weight", (rank,), "bf16")
    yield TensorSpec(f"{attn}.wq_b.weight", (heads_width, rank), "fp8")
    yield TensorSpec(f"{attn}.wkv.weight", (head_dim, hidden), "fp8")
    yield TensorSpec(f"{attn}.kv_norm.weight", (head_dim,), "bf16")
    yield TensorSpec(f"{attn}.attn_sink", (config.num_attention_heads,), "f32")
    yield TensorSpec(f"{attn}.wo_a.weight", (grouped, heads_width // config.o_groups), "fp8")
    yield TensorSpec(f"{attn}.wo_b.weight", (hidden, grouped), "fp8")
    if role.owns_kv:
        yield TensorSpec(f"{attn}.compressor.wkv.weight", (head_dim, hidden), "bf16")
        if role.ratio > 1:
            yield TensorSpec(f"{attn}.compressor.wgate.weight", (head_dim, hidden), "bf16")
        yield TensorSpec(f"{attn}.compressor.norm.weight", (head_dim,), "bf16")
        yield TensorSpec(f"{attn}.indexer.wk.weight", (config.index_head_dim, head_dim), "bf16")
        yield TensorSpec(f"{attn}.indexer.k_norm.weight", (config.index_head_dim,), "bf16")
    if role.owns_index:
        yield TensorSpec(f"{attn}.indexer.wq_b.weight", (config.index_n_heads * config.index_head_dim, rank), "fp8")
        yield TensorSpec(f"{attn}.indexer.weights_proj.weight", (config.index_n_heads, hidden), "bf16")


def _experts(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    yield TensorSpec(f"{prefix}.ffn_norm.weight", (hidden,), "bf16")
    ffn = f"{prefix}.ffn"
    yield TensorSpec(f"{ffn}.gate.weight", (experts, hidden), "bf16")
    yield TensorSpec(f"{ffn}.gate.bias", (experts,), "f32")
    yield TensorSpec(f"{ffn}.gate.bias_vl", (experts,), "f32")
    shapes = {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}
    for matrix, shape in shapes.items():
        yield TensorSpec(f"{ffn}.shared_experts.{matrix}.weight", shape, "fp8")
    for expert in range(experts):
        for matrix, shape in shapes.items():
            yield TensorSpec(f"{ffn}.experts.{expert}.{matrix}.weight", shape, "fp4")
