"""Log-probabilities of given tokens and of the most likely ones: log-softmax of the model's own logits.

No bias, penalty, constraint or temperature enters them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from widemesh.serving.limits import MAX_LOGPROBS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowLogprobs:
    """Of one step; zeros unless some slot asks. K = MAX_LOGPROBS, or the vocabulary if that is smaller."""

    chosen: Float[Array, "B"]
    rank: Int32[Array, "B"]  # of the chosen token; the most likely one has 1
    top_ids: Int32[Array, "B K"]  # most likely first, equals by id
    top: Float[Array, "B K"]


def row_logprobs(logits: Float[Array, "B V"], tokens: Int32[Array, "B"], asked: Int32[Array, "B"]) -> RowLogprobs:
    """`asked` is -1 in slots that ask for nothing; the work is done if any other value is there."""
    return lax.cond(jnp.any(asked >= 0), token_logprobs, _zeros, logits, tokens)


def token_logprobs(logits: Float[Array, "B V"], tokens: Int32[Array, "B"]) -> RowLogprobs:
    """What each row's logits say of its token."""
    values = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(values, tokens[:, None], axis=-1)
    ids = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    before = (values > chosen) | ((values == chosen) & (ids < tokens[:, None]))
    top, top_ids = lax.top_k(values, min(MAX_LOGPROBS, values.shape[-1]))
    return RowLogprobs(chosen[:, 0], 1 + jnp.sum(before, axis=-1, dtype=jnp.int32), top_ids.astype(jnp.int32), top)


def _zeros(logits: Float[Array, "B V"], tokens: Int32[Array, "B"]) -> RowLogprobs:
    shape = (logits.shape[0], min(MAX_LOGPROBS, logits.shape[-1]))
    return RowLogprobs(jnp.zeros(shape[0]), jnp.zeros(shape[0], jnp.int32), jnp.zeros(shape, jnp.int32),
                       jnp.zeros(shape))  # fmt: skip
