"""The op on a GPU: a kernel scores and keeps the best of what each block of threads sees, others narrow the lists.

mosaic_spans.py   scores = sum over heads of relu(q . k) * w, on the tensor cores; per row and block of threads a
                  list of the k best, and the maxima of blocks of entries. Formula, tiling and floor stand there.
mosaic_lists.py   the k best of the lists of a row, in rounds; the best candidate blocks likewise.
here              queries grouped and permuted, addresses of what is read, the last sort of k numbers: XLA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from widemesh.pallas_kernels.gpu import GpuTarget
from widemesh.pallas_kernels.layout import SourceLayout
from widemesh.pallas_kernels.select_entries.best import THREADS
from widemesh.pallas_kernels.select_entries.mosaic_lists import narrow, round_up
from widemesh.pallas_kernels.select_entries.mosaic_spans import Keys, score_and_keep
from widemesh.pallas_kernels.select_entries.selected import Selected
from widemesh.pallas_kernels.select_entries.tiles import choose_tiles

_PRODUCTS = 32  # rows times heads of a group are a multiple: a copy of their weights is then whole 128 bytes
_MAXIMA_BYTES = 256 << 20  # of block maxima in HBM at a time


def select_entries_mosaic(
    queries: Float[Array, "B S I J"],
    weights: Float[Array, "B S I"],
    pages: UInt8[Array, "pages page_bytes"],
    table: Int32[Array, "B P"],
    visible: Int32[Array, "B S"],
    blocks: Int32[Array, "B S C"] | None,
    *,
    source: SourceLayout,
    k: int,
    block: int,
    top_blocks: int | None,
    target: GpuTarget,
) -> Selected:
    """See `op.select_entries`. Many rows that write candidates are worked off a few at a time."""
    b, s, _, dim = queries.shape
    _check(pages, source, dim, block, restricted=blocks is not None, has_maxima=top_blocks is not None)
    if blocks is not None:
        return _among_blocks(queries, weights, pages, table, visible, blocks, source=source, k=k, block=block,
                             target=target)  # fmt: skip

    def select(queries: Array, weights: Array, visible: Array) -> Selected:
        return _among_all(queries, weights, pages, table, visible, source=source, k=k, block=block,
                          top_blocks=top_blocks, target=target)  # fmt: skip

    row_bytes = 0 if top_blocks is None else 4 * b * (table.shape[1] * source.rows // block)
    pieces = next(n for n in range(1, s + 1) if s % n == 0 and (n == s or s // n * row_bytes <= _MAXIMA_BYTES))
    if pieces == 1:
        return select(queries, weights, visible)
    cut = [jnp.moveaxis(x.reshape(b, pieces, s // pieces, *x.shape[2:]), 1, 0) for x in (queries, weights, visible)]
    found = lax.map(lambda piece: select(*piece), tuple(cut))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(b, s, x.shape[-1]), found)


def _among_all(
    queries: Float[Array, "B S I J"],
    weights: Float[Array, "B S I"],
    pages: UInt8[Array, "pages page_bytes"],
    table: Int32[Array, "B P"],
    visible: Int32[Array, "B S"],
    *,
    source: SourceLayout,
    k: int,
    block: int,
    top_blocks: int | None,
    target: GpuTarget,
) -> Selected:
    """The rows of a request share its keys, in groups."""
    b, s, heads, _ = queries.shape
    entries = table.shape[1] * source.rows
    places = round_up(k, THREADS)
    tiles = choose_tiles(target, requests=b, rows=s, heads=heads, entries=entries, places=places)
    keys = Keys(unit=source.rows, page=table, place=None, scales=None)
    visible = jnp.clip(visible, 0, entries)
    q, w, seen = _grouped(queries, weights, visible, tiles.rows)
    kept = score_and_keep(q, w, pages, keys, seen, source=source, target=target, tiles=tiles, k=k,
                          block=None if top_blocks is None else block)  # fmt: skip
    scores, positions = (_ungrouped(x, b, s) for x in (kept.scores, kept.positions))
    indices = narrow(scores, positions, k, chunk=tiles.chunk, num_positions=entries).reshape(b, s, k)
    if kept.maxima is None or top_blocks is None:
        return Selected(indices=indices, blocks=None)
    counts = (visible.reshape(-1) + block - 1) // block
    chosen = narrow(_ungrouped(kept.maxima, b, s), None, top_blocks, chunk=tiles.chunk,
                    num_positions=kept.maxima.shape[-1], counts=counts)  # fmt: skip
    return Selected(indices=indices, blocks=chosen.reshape(b, s, top_blocks))


def _among_blocks(
    queries: Float[Array, "B S I J"],
    weights: Float[Array, "B S I"],
    pages: UInt8[Array, "pages page_bytes"],
    table: Int32[Array, "B P"],
    visible: Int32[Array, "B S"],
    blocks: Int32[Array, "B S C"],
    *,
    source: SourceLayout,
    k: int,
    block: int,
    target: GpuTarget,
) -> Selected:
    """Every row is a request of its own, whose units are its blocks.

    Since blocks ascend, what a row sees of the list of their entries is the front of it.
    """
    b, s, c = blocks.shape
    heads = queries.shape[2]
    places = round_up(k, THREADS)
    tiles = choose_tiles(target, requests=b * s, rows=1, heads=heads, entries=c * block, places=places)
    spread = tiles.span // block
    padded = jnp.pad(blocks, [(0, 0), (0, 0), (0, round_up(c, spread) - c)], constant_values=-1)
    safe = jnp.maximum(padded, 0) * block  # first entry
    page = table[jnp.arange(b)[:, None, None], jnp.minimum(safe // source.rows, table.shape[1] - 1)]
    page = jnp.clip(page, 0, pages.shape[0] - 1)
    place = safe % source.rows
    scales = _gather_scales(pages, page, place, block, source).reshape(b * s, -1)
    keys = Keys(unit=block, page=page.reshape(b * s, -1), place=place.reshape(b * s, -1), scales=scales)
    inside = jnp.clip(jnp.minimum(visible, table.shape[1] * source.rows)[..., None] - safe, 0, block)
    seen = jnp.sum(jnp.where(padded >= 0, inside, 0), axis=-1, dtype=jnp.int32)
    q, w, seen = _grouped(queries.reshape(b * s, 1, heads, -1), weights.reshape(b * s, 1, heads),
                          seen.reshape(b * s, 1), 1)  # fmt: skip
    kept = score_and_keep(q, w, pages, keys, seen, source=source, target=target, tiles=tiles, k=k, block=None)
    scores, positions = (_ungrouped(x, b * s, 1) for x in (kept.scores, kept.positions))
    found = narrow(scores, positions, k, chunk=tiles.chunk, num_positions=padded.shape[-1] * block).reshape(b, s, k)
    first = jnp.take_along_axis(safe, jnp.maximum(found, 0) // block, axis=-1)
    return Selected(indices=jnp.where(found < 0, -1, first + found % block), blocks=None)


def _gather_scales(
    pages: UInt8[Array, "pages page_bytes"],
    page: Int32[Array, "B S C"],
    place: Int32[Array, "B S C"],
    block: int,
    source: SourceLayout,
) -> UInt8[Array, "B S C bytes"]:
    """The scales of whole blocks, side by side: their pieces in the pages are too short to be copied by a kernel."""
    size = source.key.scale_bytes
    start = jnp.stack([page, source.key_scale_offset + place * size], axis=-1)
    numbers = lax.GatherDimensionNumbers(offset_dims=(3,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    return lax.gather(pages, start, numbers, (1, block * size), mode=lax.GatherScatterMode.CLIP)


def _grouped(
    queries: Float[Array, "B S I J"], weights: Float[Array, "B S I"], visible: Int32[Array, "B S"], rows: int
) -> tuple[Array, Array, Array]:
    """Groups of at least `rows` rows [G, R * I, J], [G, R * I], [G, R]; rows that are added see nothing.

    Queries get their even dimensions first, as the kernel decodes keys.
    """
    b, s, heads, dim = queries.shape
    while rows * heads % _PRODUCTS:
        rows += 1
    if rows * heads > 256:
        raise ValueError(
            f"index heads={heads} must be a multiple of {_PRODUCTS} up to 256 for the GPU kernel; use the reference"
        )
    groups = -(-s // rows)
    pad = ((0, 0), (0, groups * rows - s))
    halves = queries.reshape(b, s, heads, dim // 2, 2)
    halves = jnp.concatenate([halves[..., 0], halves[..., 1]], axis=-1).astype(jnp.bfloat16)
    q = jnp.pad(halves, (*pad, (0, 0), (0, 0))).reshape(b * groups, rows * heads, dim)
    w = jnp.pad(weights.astype(jnp.float32), (*pad, (0, 0))).reshape(b * groups, rows * heads)
    return q, w, jnp.pad(visible, pad).reshape(b * groups, rows)


def _ungrouped(x: Array, b: int, s: int) -> Array:
    """[G, R, n] -> [B * S, n], without the rows that were added."""
    return x.reshape(b, -1, x.shape[-1])[:, :s].reshape(b * s, x.shape[-1])


def _check(
    pages: UInt8[Array, "pages page_bytes"], source: SourceLayout, dim: int, block: int, *, restricted: bool,
    has_maxima: bool,
) -> None:  # fmt: skip
    """Raises ValueError for what the kernels cannot read."""
    if source.key.code != "mxfp4":
        raise ValueError(f"key.code={source.key.code!r} cannot be read by the GPU kernel; use 'mxfp4' (packed records)")
    if dim != 128:
        raise ValueError(f"index dim {dim} of the queries must be 128 for the GPU kernel; use the reference")
    if pages.shape[1] % 64 or source.key_offset % 64 or source.key_scale_offset % 16:
        raise ValueError(
            f"page_bytes={pages.shape[1]} and key_offset={source.key_offset} must be multiples of 64 "
            "for the GPU kernel; use page_size=64"
        )
    if not restricted and (64 % source.rows or source.rows < 32):
        raise ValueError(f"{source.rows} keys per page must be 32 or 64 for the GPU kernel; use page_size=64")
    if (restricted or has_maxima) and block != 8:
        raise ValueError(f"block={block} must be 8 for the GPU kernel; use the reference for other sizes")
