"""Layers in parts over `tp`: the collectives that put the parts together. With one part, none of them does anything.

Devices of one `tp` group hold the same rows, the same state and their own part of each large matrix, so whatever a
collective here returns is the same, bit for bit, on all of them; only then do they choose the same experts, entries
and tokens afterwards. T rows, K ids per row, H width of a table's row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from widemesh.sharding.axes import TP_AXIS


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """The parts of one `tp` group. The same object serves every layer of a program."""

    size: int = 1
    axis: str = TP_AXIS

    def sum(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The sum of all parts: of products whose inner dimension is cut. In the dtype of `x`, so give float32."""
        return x if self.size == 1 else jax.lax.psum(x, self.axis)

    def join(self, x: Float[Array, "... H"]) -> Float[Array, "... D"]:
        """All parts side by side along the last axis: of products whose outputs are cut. Exact."""
        return x if self.size == 1 else jax.lax.all_gather(x, self.axis, axis=x.ndim - 1, tiled=True)

    def look_up(
        self, ids: Int32[Array, "T K"], held: int, read: Callable[[Int32[Array, "T K"]], Float[Array, "T K H"]]
    ) -> Float[Array, "T K H"]:
        """Rows `ids` of a table of which every part has `held` rows, in order. Exact.

        `read` gives rows of this part by their place in it.
        """
        if self.size == 1:
            return read(ids)
        place = ids - jax.lax.axis_index(self.axis) * held
        is_mine = (place >= 0) & (place < held)
        rows = read(jnp.where(is_mine, place, 0))
        # One part has a row, the others add zeros.
        return jax.lax.psum(jnp.where(is_mine[..., None], rows, 0), self.axis)
