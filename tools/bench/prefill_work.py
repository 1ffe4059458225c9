"""How much arithmetic a prefill asks for, counted from the configuration alone."""

from __future__ import annotations

import dataclasses

from widemesh.model.checkpoint.table import tensor_table
from widemesh.model.config import ModelConfig

# Matrices by name that no row is multiplied by: tables and elementwise weights.
_NO_LINEAR = ("embed.weight", "engram.q_weight", "engram.k_weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillWork:
    """FLOP of one prefill of a fresh prompt, logits of every position included; a multiply-add is 2.

    Only what the model defines is counted: the experts a token goes to, the entries a row can see, the window rows and
    selected entries it attends to. Norms, softmax, stream mixing sums and the like are not.
    """

    linears: int
    index_scores: int
    attention: int

    @property
    def gflop(self) -> float:
        """All of it, in 1e9."""
        return (self.linears + self.index_scores + self.attention) / 1e9

    @classmethod
    def count(cls, config: ModelConfig, tokens: int) -> PrefillWork:
        """Count for one prompt of `tokens` tokens from position 0."""
        linears = sum(rows * outputs * inputs for rows, outputs, inputs in linear_shapes(config, tokens))
        routed = 3 * config.num_experts_per_tok * config.moe_intermediate_size * config.hidden_size
        linears += tokens * config.num_hidden_layers * routed
        seen, attended = 0, 0
        for role in config.roles:
            attended += sum(min(p + 1, config.sliding_window) for p in range(tokens))
            if role.ratio:
                attended += sum(min((p + 1) // role.ratio, config.index_topk) for p in range(tokens))
            if role.owns_index:
                seen += sum((p + 1) // role.ratio for p in range(tokens))
        return cls(
            linears=2 * linears,
            index_scores=2 * seen * config.index_n_heads * config.index_head_dim,
            attention=4 * attended * config.num_attention_heads * config.head_dim,
        )


def linear_shapes(config: ModelConfig, tokens: int) -> list[tuple[int, int, int]]:
    """(rows, outputs, inputs) of every matrix that a prefill multiplies by once, routed experts left out."""
    shapes = []
    for name, spec in tensor_table(config).items():
        if len(spec.shape) != 2 or name.endswith(_NO_LINEAR) or ".experts." in name:
            continue
        rows = tokens
        if name.endswith("indexer.wk.weight"):  # acts on compressed entries
            rows //= config.compress_ratios[int(name.split(".")[1])]
        shapes.append((rows, *spec.shape))
    return shapes
