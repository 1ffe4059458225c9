"""The grouped mixture of experts on a GPU: group the rows, two grouped products with FP4 matrices, sum per row.

    x [T, D] --quantise, split columns by parity--> [2, T, D/2] --gather--> rows of the blocks [2, places, D/2]
      --product with w1, w3: clamp, gate, weight, quantise--> [2, places, F/2] --product with w2--> [2, places, D/2]
      --each row adds its K partial results in slot order, f32--> [T, D]

The sum reads by row, so its order does not depend on which block finished first. Kernels: `mosaic_gather`, and the
products of `mosaic_hopper` or `mosaic_blackwell`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from widemesh.pallas_kernels.gpu import device_target, is_interpreted
from widemesh.pallas_kernels.grouped_moe import mosaic_blackwell, mosaic_hopper
from widemesh.pallas_kernels.grouped_moe.expert import ExpertMath
from widemesh.pallas_kernels.grouped_moe.grouping import Grouping, group_rows
from widemesh.pallas_kernels.grouped_moe.mosaic_gather import gather_rows
from widemesh.pallas_kernels.grouped_moe.packed import PackedExperts
from widemesh.pallas_kernels.grouped_moe.tiles import Tiles, choose_tiles

_INTERPRETED_CTAS = 1  # its warpgroups are threads that wait for each other; more CTAs exhaust the pool they share


def moe_packed_mosaic(
    x: Float[Array, "T D"],
    slots: Int32[Array, "T K"],
    weights: Float32[Array, "T K"],
    experts: PackedExperts,
    math: ExpertMath,
    *,
    tiles: Tiles | None = None,
) -> tuple[Float32[Array, "T D"], Int32[Array, "X"]]:
    """As `grouped_moe_packed`, in bfloat16 with f32 sums. Raises ValueError for widths that the tiles do not divide."""
    t, hidden = x.shape
    pairs, held = slots.size, experts.held
    target = device_target()
    assert target is not None, "the caller chose this implementation by the target"
    variant = mosaic_blackwell if target.is_blackwell else mosaic_hopper
    for name, width, unit in (("hidden size", hidden, variant.HIDDEN_UNIT), ("expert width", experts.width, 256)):
        if width % unit:
            legal = -(-width // unit) * unit
            raise ValueError(
                f"{name} {width} must be a multiple of {unit} for the {target.name} kernel; pad to {legal}"
            )
    if pairs == 0:
        return jnp.zeros((t, hidden), jnp.float32), jnp.zeros(held, jnp.int32)
    if tiles is None:
        tiles = choose_tiles(target, rows=t, pairs=pairs, held=held)
    grouping = group_rows(slots, weights, held=held, block_rows=tiles.into.rows)
    ctas = _INTERPRETED_CTAS if is_interpreted() else target.cores
    split = split_columns(math.quantise(x).astype(jnp.bfloat16), variant.PARTS)
    rows = gather_rows(split, grouping, block_rows=tiles.into.rows, ctas=ctas)
    inner = variant.product(rows, (experts.w1, experts.w3), grouping, tiles.into, math, ctas=ctas)
    partial = variant.product(inner, (experts.w2,), grouping, tiles.out, math, ctas=ctas)
    return _sum_rows(partial, grouping), grouping.counts


def split_columns(x: BFloat16[Array, "T K"], parts: int) -> BFloat16[Array, "parts T K/parts"]:
    """Column c to part c mod `parts`: with two, even and odd columns apart."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, parts), -1, 0)


def _sum_rows(partial: Float[Array, "2 places D/2"], grouping: Grouping) -> Float32[Array, "T D"]:
    """Every row's partial results added in slot order; a pair of no expert here adds 0."""
    total = None
    for k in range(grouping.place.shape[1]):
        place = grouping.place[:, k]
        taken = partial.at[:, place].get(mode="fill", fill_value=0).astype(jnp.float32)
        total = taken if total is None else total + taken
    assert total is not None
    return jnp.moveaxis(total, 0, -1).reshape(total.shape[1], -1)
