"""Choosing the next token of every slot from its logits.

Noise is a function of (request seed, position, token id) alone, so a request's tokens do not depend on its slot, its
batch mates or the step at which it runs.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """Sampling settings per slot, always all present: a setting that is off has its neutral value."""

    temperature: Float[Array, "B"]  # 0 = greedy
    top_k: Int32[Array, "B"]  # 0 = off
    top_p: Float[Array, "B"]  # 1 = off
    seed: UInt32[Array, "B"]


def sample(
    logits: Float[Array, "B V"], rows: SamplingRows, positions: Int32[Array, "B"]
) -> Int32[Array, "B"]:
    """Token ids. `positions` are where the sampled tokens will stand in their sequences.

    Order: temperature, top-k, top-p, then the arg max of logits plus Gumbel noise. Ties go to the lower id.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return lax.cond(jnp.any(rows.temperature > 0), _sample_noisy, lambda *_: greedy, logits, rows, positions, greedy)


def _sample_noisy(
    logits: Float[Array, "B V"], rows: SamplingRows, positions: Int32[Array, "B"], greedy: Int32[Array, "B"]
) -> Int32[Array, "B"]:
    warm = rows.temperature > 0
    scaled = logits / jnp.where(warm, rows.temperature, 1.0)[:, None]
    is_filtered = warm & ((rows.top_k > 0) | (rows.top_p < 1.0))
    kept = lax.cond(jnp.any(is_filtered), kept_tokens, lambda s, *_: jnp.ones(s.shape, bool),
                    scaled, rows.top_k, rows.top_p)  # fmt: skip
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(rows.seed, positions, logits.shape[-1])
    chosen = jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1).astype(jnp.int32)
    return jnp.where(warm, chosen, greedy)


def kept_tokens(
    logits: Float[Array, "B V"], top_k: Int32[Array, "B"], top_p: Float[Array, "B"]
) -> Bool[Array, "B V"]:
    """Mask of the tokens that top-k and then top-p leave. The most likely token is always kept."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = lax.broadcasted_iota(jnp.int32, ranked.shape, 1)
    within = (top_k[:, None] == 0) | (rank < top_k[:, None])
    probability = jax.nn.softmax(jnp.where(within, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    within &= (before < top_p[:, None]) | (rank == 0)
    batch = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[batch, order].set(within)


def _gumbel(seed: UInt32[Array, ""], position: Int32[Array, ""], vocab: int) -> Float[Array, "V"]:
    """Noise of one row, one value per token id."""
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab,))
