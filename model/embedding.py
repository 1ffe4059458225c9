"""Tables of one row per token id."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float, Int32

from widemesh.model.params import param, value
from widemesh.model.step import StepContext


class Embedding(nnx.Module):
    """One row per token id, stored in bfloat16; over `tp` each device has some of the rows."""

    def __init__(self, vocab_size: int, width: tuple[int, str | None]):
        self.weight = param((vocab_size, "vocab"), width, stored="bf16")

    def __call__(self, ids: Int32[Array, "B S"], step: StepContext) -> Float[Array, "B S D"]:
        """The rows of `ids`, as they are stored."""
        table = value(self.weight)
        rows: Float[Array, "B S D"] = step.settings.tp.look_up(ids, table.shape[0], lambda own: table[own])
        return rows
