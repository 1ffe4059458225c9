"""The rows of a decode step: each slot's newest token and the drafts behind it, and what is drawn from them.

Every row's token is drawn as if its slot had no drafts, by the same noise; a draft is accepted where the row before it
has drawn it. For a draft that is the draft model's likeliest token this is the rejection rule of speculative sampling:
it is accepted with the probability p that the model gives it, and otherwise replaced by a draw from the rest. So drafts
change no token of any request (docs/model.md, "DSpark draft"). B slots of a rank, K rows of a slot, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from widemesh.serving.decode_state import DecodeState
from widemesh.serving.sampling import RowLogprobs, SamplingRows, Tally, sample


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DrawnRows:
    """What rows have drawn, in their order."""

    tokens: Int32[Array, "K B"]
    runs: Bool[Array, "K B"]  # rows whose token counts
    finite: Bool[Array, "K B"]  # of those, whose logits are finite; true for the others
    logprobs: RowLogprobs  # [K, B, ...]


def rows_of(
    state: DecodeState, limit: Int32[Array, "B"]
) -> tuple[Int32[Array, "B K"], Int32[Array, "B"]]:
    """Tokens of each slot's rows and how many it runs, `limit` at most: none when it is done.

    A slot runs no row behind which it may draw nothing, since its pages may end there.
    """
    num_drafts = jnp.sum(state.drafts >= 0, axis=1, dtype=jnp.int32)
    tokens = jnp.concatenate([state.token[:, None], jnp.maximum(state.drafts, 0)], axis=1)
    length = jnp.minimum(jnp.minimum(1 + num_drafts, limit), state.last - state.position)
    return tokens, jnp.where(state.is_done, 0, jnp.maximum(length, 0))


def draw_rows(
    logits: Float[Array, "B K V"], length: Int32[Array, "B"], state: DecodeState, tally: Tally,
    sampling: SamplingRows, mask: UInt32[Array, "B W"],
) -> tuple[DecodeState, Tally, DrawnRows]:  # fmt: skip
    """Draw from the rows of `rows_of`, left to right: a row counts if the one before has drawn its token."""
    drafts = jnp.concatenate([state.drafts, jnp.full((len(length), 1), -1, jnp.int32)], axis=1)  # none behind the last

    def body(carry: Any, row: tuple[Array, Array, Array]) -> Any:
        state, tally, runs = carry
        number, draft, logits = row
        draw, tally = sample(logits, sampling, mask, tally, state.position + 1, runs)
        state = state.advance(draw.tokens, runs)
        finite = jnp.all(jnp.isfinite(logits), axis=-1) | ~runs
        goes_on = runs & ~state.is_done & (draw.tokens == draft) & (number + 1 < length)
        return (state, tally, goes_on), DrawnRows(draw.tokens, runs, finite, draw.logprobs)

    carry, count = (state, tally, length > 0), logits.shape[1]
    if count == 1:
        carry, drawn = body(carry, (jnp.int32(0), drafts[:, 0], logits[:, 0]))
        return *carry[:2], jax.tree.map(lambda x: x[None], drawn)
    rows = jnp.arange(count, dtype=jnp.int32), drafts.T, jnp.swapaxes(logits, 0, 1)
    carry, drawn = lax.scan(body, carry, rows)
    return *carry[:2], drawn
