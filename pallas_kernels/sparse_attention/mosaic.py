"""`attend_packed` on a GPU: lists of places, one kernel over all rows, and the joining of splits.

    w[n, j] = 2^(q[n] . k[j] log2(e) / sqrt(H)),   out[n] = sum_j w[n, j] k[j] / (sum_j w[n, j] + 2^(sink[n] log2(e)))

One block of threads takes one row, 64 heads, and a share of the row's blocks of 64 keys:

      places [blocks, 64]             (XLA: window rows, then entries; -1 = unseen)
         | one bulk copy per key
      packed bytes [64, 304]          shared memory, 19 KiB
         | E2M1 / E4M3 -> float16, scaled
      key tile [64, H]  x 2 slots     shared memory, 2 x 64 KiB        q [64, H]: 64 KiB
         | scores [64, 64] = q K^T -> online softmax -> out [64, H] += weights K

A key is read once and serves as key and value. With few rows the blocks of a row are split over several blocks of
threads, and XLA joins their parts (sum, maximum, sum of weights).

Floor per row and layer at k = 512 and window 128: 67,584 + 147,456 bytes of keys, 65,536 of q and as many of the
result, 346 KB in all; 84 MFLOP. At 64 rows on an H200 that is 4.6 us of memory and 5.4 us of tensor cores, at 2,048
rows 0.15 and 0.17 ms, if nothing is in the second-level cache: both bind alike. The kernel moves 2,048 + 5,120 bytes
per row more (window rows overlap by 16 bytes; the lists), q once more as float16 where XLA does not fuse that, and
with splits also their float32 parts, written and read. On Hopper it does half as many products again, because both
multiplying warpgroups compute the scores, and every bulk copy takes an arrival of all 128 threads at a barrier (8,192
per block of keys), for Pallas offers no other there; on Blackwell it takes one.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from widemesh.pallas_kernels.gpu import GpuTarget
from widemesh.pallas_kernels.layout import SourceLayout, VectorLayout
from widemesh.pallas_kernels.sparse_attention.mosaic_blackwell import attend_blackwell
from widemesh.pallas_kernels.sparse_attention.mosaic_hopper import attend_hopper
from widemesh.pallas_kernels.sparse_attention.parts import join
from widemesh.pallas_kernels.sparse_attention.places import BLOCK, key_places, window_blocks
from widemesh.pallas_kernels.sparse_attention.producer import HEADS
from widemesh.pallas_kernels.sparse_attention.tiles import Tiles, choose_tiles

HEAD_DIM = 512  # q and two key tiles fill shared memory, and records of no smaller dim end on 16 bytes
MOST_BLOCKS = 12  # of a list in shared memory
_LARGEST = 65504.0  # of float16
_ALIGNED = 16  # bytes, of a bulk copy


def attend_packed_mosaic(
    q: Float[Array, "B S N H"],
    window_rows: UInt8[Array, "B M row_bytes"],
    origin: Int32[Array, "B"],
    start: Int32[Array, "B"],
    first: Int32[Array, "B"],
    pages: UInt8[Array, "pages page_bytes"],
    table: Int32[Array, "B P"],
    indices: Int32[Array, "B S k"],
    sink: Float[Array, "N"],
    *,
    source: SourceLayout | None,
    window_layout: VectorLayout,
    window: int,
    target: GpuTarget,
    tiles: Tiles | None = None,
) -> Float[Array, "B S N H"]:
    """See `attend_packed`. Raises ValueError for shapes that the kernels are not written for."""
    b, s, n, h = q.shape
    kept, k = window_rows.shape[1], indices.shape[2]
    check_kernel_shapes(n, h, k, pages.shape[1], source, window_layout, window)
    if b * s == 0:
        return jnp.zeros_like(q)
    if k == 0 or table.shape[1] == 0 or pages.shape[0] == 0:  # there is no entry to read
        source, pages = None, jnp.zeros((1, _ALIGNED), jnp.uint8)
    places, used = key_places(origin, start, first, table, indices, kept=kept, source=source, window=window)
    tiles = tiles or choose_tiles(target, rows=b * s * (n // HEADS), blocks=places.shape[1])
    kernel = attend_blackwell if target.is_blackwell else attend_hopper
    halves = jnp.clip(q, -_LARGEST, _LARGEST).astype(jnp.float16).reshape(b * s, n, h)
    sink = sink.astype(jnp.float32) * math.log2(math.e)
    acc, *parts = kernel(
        halves, window_rows.reshape(b * kept, -1), pages, places, used, sink, source=source,
        window_blocks=window_blocks(window), splits=tiles.splits, dtype=q.dtype,
    )  # fmt: skip
    if tiles.splits == 1:
        return acc.reshape(q.shape)
    top, total = parts
    return join(acc, top, total, sink).reshape(q.shape).astype(q.dtype)


def check_kernel_shapes(
    heads: int,
    dim: int,
    k: int,
    page_bytes: int,
    source: SourceLayout | None,
    window_layout: VectorLayout,
    window: int,
) -> None:
    """Raise ValueError for what the kernels are not written for."""
    if heads % HEADS or not heads:
        legal = max(HEADS, -(-heads // HEADS) * HEADS)
        raise ValueError(f"q has N={heads} heads, the kernel takes multiples of {HEADS}; pad q and sink to {legal}")
    if dim != HEAD_DIM:
        raise ValueError(f"q has head dim H={dim}, the kernel takes {HEAD_DIM} alone; use implementation='reference'")
    codes = [("window_layout.code", window_layout.code, "fp8")]
    if source is not None:
        codes.append(("source.row.code", source.row.code, "nvfp4"))
    for name, code, wanted in codes:
        if code != wanted:
            raise ValueError(f"{name}={code!r} must be {wanted!r} for the kernel; use packed caches")
    if source is not None and (page_bytes % _ALIGNED or source.row_offset % _ALIGNED):
        raise ValueError(
            f"page_bytes={page_bytes} and source.row_offset={source.row_offset} must be multiples of {_ALIGNED} for "
            "the kernel; use a page_size that is a multiple of 8"
        )
    blocks = window_blocks(window) + -(-k // BLOCK)
    if blocks > MOST_BLOCKS:
        raise ValueError(
            f"window={window} and k={k} take {blocks} blocks of {BLOCK} keys, and the kernel holds {MOST_BLOCKS}; "
            f"select at most {(MOST_BLOCKS - window_blocks(window)) * BLOCK} entries"
        )
