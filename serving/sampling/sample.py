"""The next token of every slot.

Order: logit biases; constraint and minimum length; penalties; temperature; min-p; top-k; top-p; then the arg max of
logits plus Gumbel noise. Noise is a function of (request seed, position, token id) alone, so a request's tokens do not
depend on its slot, its batch mates or the step at which it runs. Each costly part runs only if some slot asks for it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from widemesh.serving.sampling.filters import add_biases, apply_masks, has_bias, has_filter, has_mask, kept_tokens
from widemesh.serving.sampling.logprobs import RowLogprobs, row_logprobs
from widemesh.serving.sampling.rows import SamplingRows
from widemesh.serving.sampling.tally import Tally, count_tokens, has_penalty, penalise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """What one step drew."""

    tokens: Int32[Array, "B"]
    logprobs: RowLogprobs


def sample(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    mask: UInt32[Array, "B W"],
    tally: Tally,
    positions: Int32[Array, "B"],
    is_active: Bool[Array, "B"],
) -> tuple[Draw, Tally]:
    """Draw one token per slot and count it in the tally of active slots.

    `positions` are where the tokens will stand in their sequences; `mask` has a bit per token a constraint allows.
    Ties go to the lower id.
    """
    is_shaped = has_bias(rows) | has_mask(rows, mask, positions) | has_penalty(rows)
    is_plain = ~(is_shaped | jnp.any(rows.temperature > 0))
    # The plain case is a branch of its own, because conditions that hand logits through copy them.
    tokens = lax.cond(is_plain, lambda x, *_: _best(x), _choose, logits, rows, mask, tally, positions)
    return Draw(tokens, row_logprobs(logits, tokens, rows.logprobs)), count_tokens(tally, tokens, is_active)


def shape_logits(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    mask: UInt32[Array, "B W"],
    tally: Tally,
    positions: Int32[Array, "B"],
) -> Float[Array, "B V"]:
    """Logits after biases, masks and penalties; -inf where a token must not come."""
    logits = lax.cond(has_bias(rows), add_biases, lambda x, _: x, logits, rows)
    logits = lax.cond(has_mask(rows, mask, positions), apply_masks, lambda x, *_: x, logits, rows, mask, positions)
    return lax.cond(has_penalty(rows), penalise, lambda x, *_: x, logits, rows, tally)


def _choose(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    mask: UInt32[Array, "B W"],
    tally: Tally,
    positions: Int32[Array, "B"],
) -> Int32[Array, "B"]:
    shaped = shape_logits(logits, rows, mask, tally, positions)
    greedy = _best(shaped)
    return lax.cond(jnp.any(rows.temperature > 0), _draw, lambda *_: greedy, shaped, rows, positions, greedy)


def _best(logits: Float[Array, "B V"]) -> Int32[Array, "B"]:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _draw(
    logits: Float[Array, "B V"], rows: SamplingRows, positions: Int32[Array, "B"], greedy: Int32[Array, "B"]
) -> Int32[Array, "B"]:
    warm = rows.temperature > 0
    scaled = logits / jnp.where(warm, rows.temperature, 1.0)[:, None]
    kept = lax.cond(jnp.any(warm & has_filter(rows)), kept_tokens, lambda s, *_: jnp.ones(s.shape, bool),
                    scaled, rows.top_k, rows.top_p, rows.min_p)  # fmt: skip
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(rows.seed, positions, logits.shape[-1])
    chosen = jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1).astype(jnp.int32)
    return jnp.where(warm, chosen, greedy)


def _gumbel(seed: UInt32[Array, ""], position: Int32[Array, ""], vocab: int) -> Float[Array, "V"]:
    """Noise of one row, one value per token id."""
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab,))
