"""The k best of long lists of scores, in rounds: chunk by chunk to k each, until one chunk is left."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from widemesh.pallas_kernels.gpu import kernel_options
from widemesh.pallas_kernels.select_entries.best import THREADS, Piece, choose_best, compact, strided


def narrow(
    scores: Float[Array, "T n"],
    positions: Int32[Array, "T n"] | None,
    k: int,
    *,
    chunk: int,
    num_positions: int,
    counts: Int32[Array, "T"] | None = None,
) -> Int32[Array, "T k"]:
    """Positions of the k largest scores above -inf of each row, ascending, then -1.

    Equal scores go to the lower position. A position is below `num_positions`, and -1 where there is no score. Without
    positions the first `counts` scores of each row compete and lie in order.
    """
    places = round_up(k, THREADS)
    chunk = max(chunk, 2 * places)
    bits = max(1, num_positions.bit_length())
    while True:
        size = min(chunk, round_up(scores.shape[1], THREADS))
        pad = [(0, 0), (0, round_up(scores.shape[1], size) - scores.shape[1])]
        if pad[1][1]:
            scores = jnp.pad(scores, pad, constant_values=-jnp.inf)
            positions = None if positions is None else jnp.pad(positions, pad, constant_values=-1)
        scores, positions = _round(scores, positions, counts, size, k, places, bits)
        if scores.shape[1] == places:
            return ascending(positions, k)


def ascending(positions: Int32[Array, "*T n"], k: int) -> Int32[Array, "*T k"]:
    """At most k positions in order, -1 behind; the input has -1 anywhere."""
    last = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(positions < 0, last, positions), axis=-1)[..., :k]
    return jnp.where(ordered == last, -1, ordered)


def _round(
    scores: Float[Array, "T n"],
    positions: Int32[Array, "T n"] | None,
    counts: Int32[Array, "T"] | None,
    chunk: int,
    k: int,
    places: int,
    bits: int,
) -> tuple[Float[Array, "T m"], Int32[Array, "T m"]]:
    rows, n = scores.shape
    chunks = n // chunk
    beside = counts if positions is None else positions

    def select_entries_lists(
        scores_gmem: Any, beside_gmem: Any, out_scores: Any, out_positions: Any, *scratch: Any
    ) -> None:
        score_list, position_list, sums = scratch
        row, part = lax.axis_index("row"), lax.axis_index("chunk")
        taken = pl.ds(part * chunk, chunk)
        layout = strided(chunk)
        values = plgpu.load(scores_gmem.at[row, taken], layout=layout, optimized=False)
        if positions is None:
            where = plgpu.broadcasted_iota(jnp.int32, (chunk,), 0, layout=layout) + part * chunk
            live = where < beside_gmem[row]
        else:
            where = plgpu.load(beside_gmem.at[row, taken], layout=layout, optimized=False)
            live = where >= 0
        pieces = [Piece(scores=values, positions=where, live=live)]
        compact(pieces, choose_best(pieces, k, bits), (score_list, position_list), sums)
        put_list((score_list, position_list), out_scores.at[row, pl.ds(part * places, places)],
                 out_positions.at[row, pl.ds(part * places, places)])  # fmt: skip

    return plgpu.kernel(
        select_entries_lists,
        out_type=(
            jax.ShapeDtypeStruct((rows, chunks * places), jnp.float32),
            jax.ShapeDtypeStruct((rows, chunks * places), jnp.int32),
        ),
        scratch_types=[
            plgpu.SMEM((places,), jnp.float32), plgpu.SMEM((places,), jnp.int32), plgpu.SMEM((4,), jnp.int32)
        ],
        grid=(rows, chunks), grid_names=("row", "chunk"), **kernel_options(),
    )(scores, beside)  # fmt: skip


def put_list(lists: tuple[Any, Any], out_scores: Any, out_positions: Any) -> None:
    """Copies two lists from SMEM to their places in GMEM."""
    for source, out in zip(lists, (out_scores, out_positions), strict=True):
        out[...] = plgpu.load(source, layout=strided(source.shape[0]))


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below `value`."""
    return -(-value // multiple) * multiple
