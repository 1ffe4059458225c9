"""Random weights for small models, alive enough that what they generate tests the engine.

Each tensor is drawn from the seed and its own name, so the order of reading, or leaving tensors out, changes none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32

from widemesh.model.checkpoint.table import tensor_table
from widemesh.model.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """A normal distribution. With `by_width` the spread is divided by the square root of the last dimension."""

    mean: float = 0.0
    std: float = 1.0
    by_width: bool = False


_MATRIX = Draw(by_width=True)  # keeps the size of its input

# By the end of the name; the first match counts.
_DRAWS: tuple[tuple[str, Draw], ...] = (
    # Stream mixing: `base` far from uniform, so that neither the mix nor its transpose is the identity; `fn` small
    # enough that sigmoids and Sinkhorn steps stay off their limits.
    ("hc_attn_fn", Draw(std=0.02)),
    ("hc_ffn_fn", Draw(std=0.02)),
    ("_base", Draw()),
    ("_scale", Draw(mean=1.0, std=0.2)),
    ("attn_sink", Draw()),
    # Biases for text and for images that choose different experts; text ones leave every expert in use.
    ("ffn.gate.bias", Draw(std=0.3)),
    ("ffn.gate.bias_vl", Draw()),
    ("ffn.gate.weight", Draw(std=1.5, by_width=True)),
    ("norm.weight", Draw(mean=1.0, std=0.2)),
    ("engram.q_weight", Draw(mean=1.0, std=0.3)),
    ("engram.k_weight", Draw(mean=1.0, std=0.3)),
    ("embed.weight", Draw()),  # tokens and Engram rows alike
    ("head.weight", Draw(std=2.0, by_width=True)),  # logits of standard deviation 2
    ("wq_b.weight", Draw(std=1.5, by_width=True)),  # attention and index scores that do choose
)


def random_tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, Float32[np.ndarray, "*shape"]]]:
    """Every backbone tensor by its released name, one at a time, float32 and not rounded to any storage grid.

    `seed` must not be negative. The same (config, seed, name) gives the same values.
    """
    for name, spec in tensor_table(config).items():
        yield name, random_tensor(name, spec.shape, seed)


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> Float32[np.ndarray, "*shape"]:
    """One tensor of `random_tensors`."""
    draw = next((draw for ending, draw in _DRAWS if name.endswith(ending)), _MATRIX)
    std = draw.std / np.sqrt(shape[-1]) if draw.by_width else draw.std
    rng = np.random.default_rng([seed, int.from_bytes(name.encode(), "big")])
    values = rng.standard_normal(shape, np.float32)
    values *= np.float32(std)
    values += np.float32(draw.mean)
    return values
