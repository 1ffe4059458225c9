"""Which tokens may be drawn: constraint and stop masks before, min-p, top-k and top-p after the temperature."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from widemesh.serving.sampling.rows import NO_ID, SamplingRows, unpack_mask

_FULL_WORD = np.uint32(0xFFFFFFFF)


def has_bias(rows: SamplingRows) -> Bool[Array, ""]:
    """Whether any slot has a logit bias."""
    return jnp.any(rows.bias_ids != NO_ID)


def add_biases(logits: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Logits plus each request's biases."""
    slots = jnp.arange(logits.shape[0])[:, None]
    ids = jnp.where(rows.bias_ids == NO_ID, logits.shape[-1], rows.bias_ids)  # past the end = dropped
    return logits.at[slots, ids].add(rows.bias_values, mode="drop")


def has_mask(rows: SamplingRows, mask: UInt32[Array, "B W"], positions: Int32[Array, "B"]) -> Bool[Array, ""]:
    """Whether any slot is constrained or must not end yet."""
    return jnp.any(mask != _FULL_WORD) | jnp.any(positions < rows.first_stop)


def apply_masks(
    logits: Float[Array, "B V"], rows: SamplingRows, mask: UInt32[Array, "B W"], positions: Int32[Array, "B"]
) -> Float[Array, "B V"]:
    """Logits of the tokens that the constraint allows, without stop ids where it is too early for them.

    A constraint that leaves nothing but stop ids wins: a row without any token could not be drawn from.
    """
    vocab = logits.shape[-1]
    allowed = unpack_mask(mask, vocab)
    slots = jnp.arange(mask.shape[0])[:, None]
    is_blocked = (positions < rows.first_stop)[:, None] & (rows.stop_ids != NO_ID)
    ids = jnp.where(is_blocked, rows.stop_ids, vocab)
    without = allowed.at[slots, ids].set(False, mode="drop")
    allowed = jnp.where(jnp.any(without, axis=-1, keepdims=True), without, allowed)
    return jnp.where(allowed, logits, -jnp.inf)


def has_filter(rows: SamplingRows) -> Bool[Array, "B"]:
    """Slots with top-k, top-p or min-p."""
    return (rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)


def kept_tokens(
    logits: Float[Array, "B V"],
    top_k: Int32[Array, "B"],
    top_p: Float[Array, "B"],
    min_p: Float[Array, "B"],
) -> Bool[Array, "B V"]:
    """Mask of the tokens that min-p, then top-k, then top-p leave. The most likely token is always kept.

    min-p is relative to the most likely token; top-p is over what the other two leave. Among equal logits the lower
    id ranks first.
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = lax.broadcasted_iota(jnp.int32, ranked.shape, 1)
    within = (top_k[:, None] == 0) | (rank < top_k[:, None])
    within &= jnp.exp(ranked - ranked[:, :1]) >= min_p[:, None]
    probability = jax.nn.softmax(jnp.where(within, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # Off means off: rounded sums reach 1 before the last tokens do.
    within &= (before < top_p[:, None]) | (top_p[:, None] >= 1.0) | (rank == 0)
    batch = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[batch, order].set(within)
