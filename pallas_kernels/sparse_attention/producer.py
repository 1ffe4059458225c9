"""The warpgroup that fetches and dequantises keys: the same for both kinds of tensor core.

For each block of 64 places it issues one bulk copy per key into `packed`, waits for them, and writes the float16 key
tile of a free slot. A window record is fetched in two pieces (its upper half with the scales, then its lower half),
so that one buffer of 304 bytes a row serves both kinds of records; the 16 bytes beyond an entry put the rows of a
warp's load into different banks.

    packed [64, 304]    entry:  codes 0..255, scales 256..287
                        window: codes 256..511 at 16, scales at 272; then codes 0..255 at 0
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from widemesh.pallas_kernels.layout import SourceLayout
from widemesh.pallas_kernels.sparse_attention.dequantise import (
    CHUNK,
    ROWS,
    entry_scales,
    entry_values,
    window_scales,
    window_values,
)
from widemesh.pallas_kernels.sparse_attention.places import BLOCK

_IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # a plain bulk copy: 16-byte aligned, any length
HEADS = 64  # of one block: the M of one product
SLOTS = 2  # key tiles in shared memory
AHEAD = 8  # places that are read before the first of their copies starts


def share_of(used: jax.Array, split: jax.Array, splits: int) -> tuple[jax.Array, jax.Array]:
    """First block of a split's share of `used` blocks, and the one after its last."""
    share = lax.div(used + (splits - 1), splits)
    begin = jnp.minimum(split * share, used)
    return begin, jnp.minimum(begin + share, used)


def tile_transforms(columns: int) -> tuple[Any, Any]:
    """Of a float16 tile in shared memory whose swizzled rows hold `columns` columns."""
    tiling = plgpu.TilingTransform((8, columns))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(2 * columns)  # type: ignore[abstract]


def packed_bytes(dim: int) -> int:
    """Bytes of a row of `packed`."""
    return dim // 2 + dim // 16 + 16


def produce(
    window_rows: Any,
    pages: Any,
    places: Any,
    packed: Any,
    scale_rows: Any,
    keys: Any,
    loaded: Any,
    full: Any,
    free: Any,
    *,
    begin: jax.Array,
    end: jax.Array,
    window_blocks: int,
    source: SourceLayout | None,
) -> None:
    """Fill `keys` [SLOTS, 2, BLOCK, H / 2] with blocks `begin` .. `end` - 1 of the list `places` [blocks, BLOCK].

    Block after block goes to the next slot, once `free` of that slot says so (the first ones need no leave); then
    `full` of the slot is told. The other references are as in the file's docstring; all but `pages` and `window_rows`
    are in shared memory.
    """

    @pl.loop(begin, end)
    def _(block: jax.Array) -> None:
        slot = lax.rem(block - begin, SLOTS)

        def wait_free() -> None:
            @pl.when(block - begin >= SLOTS)
            def _() -> None:
                plgpu.barrier_wait(free.at[slot])

        args = (places.at[block], packed, scale_rows, keys.at[slot], loaded, wait_free)

        @pl.when(block < window_blocks)
        def _() -> None:
            produce_window(window_rows, *args)

        if source is not None and places.shape[0] > window_blocks:

            @pl.when(block >= window_blocks)
            def _() -> None:
                produce_entries(pages, *args, source)

        plgpu.commit_smem()
        plgpu.barrier_arrive(full.at[slot])


def produce_window(
    window_rows: Any, places: Any, packed: Any, scale_rows: Any, keys: Any, loaded: Any, wait_free: Any
) -> None:
    """Key tile [2, BLOCK, H / 2] of one block of window places (references; `places` i32 [BLOCK])."""
    _, _, half = keys.shape
    dim = 2 * half
    lead = 16  # bytes of the lower half that come along, since the upper half and the scales are 8.5 times 32 bytes
    size = lead + half + dim // 32
    _fetch(window_rows, places, packed, loaded, lambda place: (place, half - lead), size)
    plgpu.barrier_wait(loaded)
    seen = plgpu.load(places, layout=ROWS, optimized=False) >= 0
    window_scales(packed, seen, scale_rows, begin=lead + half)
    plgpu.commit_smem()
    wait_free()
    _fill(keys, 1, lambda chunk: window_values(packed, scale_rows, chunk, begin=lead, first=half // 32))
    plgpu.commit_smem()
    _fetch(window_rows, places, packed, loaded, lambda place: (place, 0), half)
    plgpu.barrier_wait(loaded)
    _fill(keys, 0, lambda chunk: window_values(packed, scale_rows, chunk, begin=0, first=0))


def produce_entries(
    pages: Any,
    places: Any,
    packed: Any,
    scale_rows: Any,
    keys: Any,
    loaded: Any,
    wait_free: Any,
    source: SourceLayout,
) -> None:
    """Key tile of one block of entry places."""
    _, _, half = keys.shape
    size = source.row.num_bytes

    def where(place: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.div(place, source.rows), source.row_offset + lax.rem(place, source.rows) * size

    _fetch(pages, places, packed, loaded, where, size)
    plgpu.barrier_wait(loaded)
    seen = plgpu.load(places, layout=ROWS, optimized=False) >= 0
    for part in range(2):
        entry_scales(packed, seen, scale_rows, begin=half + part * (half // 16))
        plgpu.commit_smem()
        if part == 0:
            wait_free()
        _fill(keys, part, lambda chunk, part=part: entry_values(packed, scale_rows, chunk, begin=part * half // 2))
        if part == 0:
            plgpu.commit_smem()  # the scales of this half have been read


def _fetch(source: Any, places: Any, packed: Any, loaded: Any, where: Any, size: int) -> None:
    """Start a copy of `size` bytes per place; an unseen one copies place 0, which exists, and is masked later."""

    @pl.loop(0, BLOCK // AHEAD)
    def _(step: jax.Array) -> None:
        rows = [step * AHEAD + i for i in range(AHEAD)]
        for row, place in zip(rows, [places[row] for row in rows], strict=True):
            page, offset = where(jnp.maximum(place, 0))
            plgpu.copy_gmem_to_smem(
                source.at[page, pl.ds(offset, size)], packed.at[row, pl.ds(0, size)], loaded, oob_mode=_IN_BOUNDS
            )


def _fill(keys: Any, part: int, values: Any) -> None:
    """Half `part` of the key tile, chunk after chunk; unrolled, the compiler would take four times longer."""

    @pl.loop(0, keys.shape[2] // CHUNK)
    def _(chunk: jax.Array) -> None:
        keys[part, :, pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK)] = values(chunk)
