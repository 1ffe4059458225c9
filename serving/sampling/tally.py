"""Which tokens a slot's prompt holds and how often each was put out: what penalties are made of.

It stays on the device. A step adds its tokens; a slot is written whole when a request with penalties joins it, so no
step costs more for a longer context. B slots, V vocabulary, W words of a token mask, R ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from widemesh.serving.sampling.rows import SamplingRows, mask_words, unpack_mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tally:
    """Per slot; means nothing in slots whose request has no penalties."""

    prompt: UInt32[Array, "B W"]  # bit set of the prompt's ids
    output: Int32[Array, "B V"]  # times each id was put out


@dataclasses.dataclass(frozen=True, kw_only=True)
class TallyRow:
    """A slot's tally as a request joins it."""

    slot: int
    prompt: UInt32[np.ndarray, "W"]
    output: Int32[np.ndarray, "V"]

    @staticmethod
    def of(slot: int, prompt: Int32[np.ndarray, "N"], output: list[int], vocab: int) -> TallyRow:
        """Counted from token ids; the only work that grows with the prompt, once per request."""
        seen = np.zeros(mask_words(vocab) * 32, np.uint8)
        seen[prompt] = 1
        words = np.packbits(seen, bitorder="little").view("<u4").astype(np.uint32)
        counts = np.bincount(np.asarray(output, np.int32), minlength=vocab).astype(np.int32)
        return TallyRow(slot=slot, prompt=words, output=counts)


def init_tally(slots: int, vocab: int, zeros: Callable[..., Any] = np.zeros) -> Tally:
    """Nothing seen. Host arrays; while shapes are traced, `jnp.zeros` allocates nothing."""
    return Tally(zeros((slots, mask_words(vocab)), np.uint32), zeros((slots, vocab), np.int32))


def write_tally(
    tally: Tally, slot: Int32[Array, "1"], prompt: UInt32[Array, "1 W"], output: Int32[Array, "1 V"]
) -> Tally:
    """Set one slot; -1 sets none."""
    place = jnp.where(slot < 0, tally.output.shape[0], slot)  # past the end = dropped
    return Tally(tally.prompt.at[place].set(prompt, mode="drop"), tally.output.at[place].set(output, mode="drop"))


def count_tokens(tally: Tally, tokens: Int32[Array, "B"], is_active: Bool[Array, "B"]) -> Tally:
    """Add one token per active slot."""
    slots = jnp.arange(tokens.shape[0])
    return dataclasses.replace(tally, output=tally.output.at[slots, tokens].add(is_active.astype(jnp.int32)))


def has_penalty(rows: SamplingRows) -> Bool[Array, ""]:
    """Whether any slot asks for one."""
    off = (rows.repetition_penalty == 1) & (rows.frequency_penalty == 0) & (rows.presence_penalty == 0)
    return ~jnp.all(off)


def penalise(logits: Float[Array, "B V"], rows: SamplingRows, tally: Tally) -> Float[Array, "B V"]:
    """Repetition over prompt and output: divides positive logits and multiplies the others. Then frequency times the
    count and presence, both over the output alone, are taken off.
    """
    is_out = tally.output > 0
    seen = is_out | unpack_mask(tally.prompt, logits.shape[-1])
    factor = jnp.where(seen, rows.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits -= rows.frequency_penalty[:, None] * tally.output
    return logits - rows.presence_penalty[:, None] * is_out
