"""GPU kernel that scores entries and keeps the best; no row of scores leaves the chip.

    score[row, j] = sum over heads i of relu(queries[row, i] . key[j]) * weights[row, i]

One block of threads takes a group of R rows of one request and every `splits`-th span of entries, tile by tile:

         J = 128                    R * I = 32 .. 192 products per key
       +---------+  queries^T   +-----------------------+   relu, * weights,    scores f32 in SMEM
    64 |  keys   |  [J, R * I]  | f32 accumulators      |   sum over heads     +------------------+
    or | (tile)  |      x       | [tile, R * I]         |  ----------------->  | [R, span]        |
    128|  bf16   |     SMEM     | registers or TMEM     |                      +------------------+
       +---------+              +-----------------------+                  after each span, per row: the best k of
      E2M1 codes 64 B and E8M0 scales 4 B per key, by TMA from             the list so far and of the span, by bisection
      the pages, `stages` tiles in flight; decoded in registers            over registers; maxima of blocks -> HBM.
                                                                           At the end the lists of k -> HBM

A unit is what lies together in a page: all keys of a page, or one block of candidates. Keys are the rows of the
product, so that one query row fills the tensor cores as well as six do, and the sum over heads stays within a thread
and its neighbours. Codes are decoded as two halves, even and odd dimensions, which the queries follow. Wgmma takes the
decoded keys from registers, tcgen05 from shared memory.

Floor: 68 B per entry that a group of rows sees. Moved besides, written once and read once: 8 B per place of the lists
(k of them per row and split, 12% of the floor at 8192 entries and 0.8% at 131,072) and 0.5 B per entry and row for the
block maxima. Among blocks the scales pass through HBM once more each way (72 and 4 B instead of 68).
At 2 * I * J = 8192 FLOP per entry and row, one row (120 FLOP/B) is bound by memory, six rows (723 FLOP/B) or more by
the tensor cores. Decoding and weighting cost about 380 instructions per thread and tile of 64 keys with one row, which
at full rate take longer (6 cycles per key) than reading the keys (3.3 on an H200).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32, UInt8

from widemesh.pallas_kernels.gpu import GpuTarget, is_interpreted, kernel_options, swap
from widemesh.pallas_kernels.gpu.wgmma import wgmma
from widemesh.pallas_kernels.layout import SourceLayout
from widemesh.pallas_kernels.select_entries.best import THREADS, Piece, choose_best, compact, empty_lists, strided
from widemesh.pallas_kernels.select_entries.mosaic_lists import put_list, round_up
from widemesh.pallas_kernels.select_entries.nibbles import decode_nibbles
from widemesh.pallas_kernels.select_entries.tiles import Tiles

_SCALE_GROUP = 32
_MOST_COPIED = 256  # elements along an axis of one TMA copy

swap(
    kernel="select_entries",
    missing="wgmma with the keys in registers",
    staged="the keys written to shared memory first",
)
swap(
    kernel="select_entries",
    missing="shared memory read under another shape (scales of keys, scores of blocks)",
    staged="the same values read under their own shape",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys:
    """Where the keys of a group lie: unit u of request b is `unit` keys of page `page[b, u]` from `place[b, u]` on.

    `scales` holds the scales of all units side by side where they were gathered; None reads them from the pages, whose
    units are then whole pages (`place` is None as well).
    """

    unit: int
    page: Int32[Array, "B U"]
    place: Int32[Array, "B U"] | None
    scales: UInt8[Array, "B scale_bytes"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """Lists of the best of each split, side by side, and the maxima of blocks."""

    scores: Float32[Array, "G R n"]  # -inf behind a split's best
    positions: Int32[Array, "G R n"]  # -1 there
    maxima: Float32[Array, "G R blocks"] | None  # of visible blocks, +inf for the newest; the rest is undefined


def score_and_keep(
    queries: BFloat16[Array, "G N J"],
    weights: Float32[Array, "G N"],
    pages: UInt8[Array, "pages page_bytes"],
    keys: Keys,
    visible: Int32[Array, "G R"],
    *,
    source: SourceLayout,
    target: GpuTarget,
    tiles: Tiles,
    k: int,
    block: int | None,
) -> Kept:
    """Scores of the first `visible` positions of each row, reduced to the k best of every split.

    G groups of R rows, N = R * I; group g reads the keys of request g // (G / B). Queries have their even dimensions
    first. With `block` the maxima of blocks are kept too.
    """
    groups, products, dim = queries.shape
    requests, units = keys.page.shape
    rows = visible.shape[1]
    heads = products // rows
    per_request = groups // requests
    span, tile, stages = tiles.span, tiles.keys, tiles.stages
    spans = -(-units * keys.unit // span)
    splits = min(tiles.splits, spans)
    tiles_per_span = span // tile
    places = round_up(k, THREADS)
    per_tile = tile // keys.unit
    width = dim // 2  # bytes of codes
    scale_bytes = dim // _SCALE_GROUP
    staged = is_interpreted() or target.is_blackwell  # keys go through shared memory
    bits = (spans * span).bit_length()
    codes = pages.reshape(pages.shape[0], -1, width)
    layout = plgpu.Layout.TCGEN05 if target.is_blackwell else plgpu.Layout.WGMMA  # of the products

    def select_entries_spans(*refs: Any) -> None:
        inputs, outputs, scratch = _by_name(refs, arrays, out_types, scratch_types)
        group, split = lax.axis_index("group"), lax.axis_index("split")
        request = group // per_request
        end = inputs["visible"][group, 0]
        for r in range(1, rows):
            end = jnp.maximum(end, inputs["visible"][group, r])
        # This block's spans are every `splits`-th one, so that blocks share what is visible whatever its length.
        turns = jnp.maximum((end + span - 1) // span - split + splits - 1, 0) // splits
        last = jnp.clip(end - ((turns - 1) * splits + split) * span, 0, span)
        count = jnp.where(turns > 0, (turns - 1) * tiles_per_span + (last + tile - 1) // tile, 0)

        def first_of(turn: Any) -> Any:
            return (turn * splits + split) * span

        def fetch(i: Any) -> None:
            slot = lax.rem(i, stages)
            ready = scratch["ready"].at[slot]
            first = first_of(i // tiles_per_span) + lax.rem(i, tiles_per_span) * tile
            for u in range(per_tile):
                number = jnp.minimum(first // keys.unit + u, units - 1)
                page = jnp.clip(inputs["page"][request, number], 0, pages.shape[0] - 1)
                place = 0 if keys.place is None else inputs["place"][request, number]
                begin = source.key_offset // width + place
                plgpu.copy_gmem_to_smem(inputs["codes"].at[page, pl.ds(begin, keys.unit)],
                                        scratch["codes"].at[slot, pl.ds(u * keys.unit, keys.unit)], ready)  # fmt: skip
                if keys.scales is None:
                    size = keys.unit * scale_bytes
                    plgpu.copy_gmem_to_smem(inputs["scales"].at[page, pl.ds(source.key_scale_offset, size)],
                                            scratch["scales"].at[slot, pl.ds(u * size, size)], ready)  # fmt: skip
            if keys.scales is not None:
                for piece in range(0, tile * scale_bytes, _MOST_COPIED):
                    begin = first * scale_bytes + piece
                    plgpu.copy_gmem_to_smem(inputs["scales"].at[request, pl.ds(begin, _MOST_COPIED)],
                                            scratch["scales"].at[slot, pl.ds(piece, _MOST_COPIED)], ready)  # fmt: skip

        def start() -> None:
            plgpu.copy_gmem_to_smem(inputs["queries"].at[group], scratch["queries"], scratch["loaded"])
            plgpu.copy_gmem_to_smem(inputs["weights"].at[group], scratch["weights"], scratch["loaded"])
            for i in range(stages - 1):
                pl.when(i < count)(functools.partial(fetch, jnp.int32(i)))
            plgpu.barrier_wait(scratch["loaded"])

        def lists_of(r: Any) -> tuple[Any, Any]:
            return scratch["score_lists"].at[r], scratch["position_lists"].at[r]

        def score(i: Any, carry: Any) -> Any:
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(scratch["ready"].at[slot])
            pl.when(i + stages - 1 < count)(lambda: fetch(i + stages - 1))
            halves = _decode(scratch["codes"].at[slot], scratch["scales"].at[slot], tile, scale_bytes)
            dots = _multiply(halves, scratch, (tile, products), width, target=target, staged=staged)
            weight = plgpu.load(scratch["weights"], layout=layout.reduce(0), optimized=False)
            weight = plgpu.layout_cast(lax.broadcast_in_dim(weight, dots.shape, [1]), layout)
            terms = jnp.maximum(dots, 0.0) * weight
            at = pl.ds(lax.rem(i, tiles_per_span) * tile, tile)
            for r in range(rows):
                total = jnp.sum(lax.slice(terms, (0, r * heads), (tile, (r + 1) * heads)), axis=1)
                scratch["scores"][r, at] = plgpu.layout_cast(total, layout.reduce(1))
            return carry

        def choose(r: Any, turn: Any) -> Any:
            first = first_of(turn)
            seen = jnp.clip(inputs["visible"][group, r] - first, 0, span)
            score_list, position_list = lists_of(r)
            known = plgpu.load(position_list, layout=strided(places))
            index = plgpu.broadcasted_iota(jnp.int32, (span,), 0, layout=strided(span))
            scores = plgpu.load(scratch["scores"].at[r], layout=strided(span))
            pieces = [
                Piece(scores=plgpu.load(score_list, layout=strided(places)), positions=known, live=known >= 0),
                Piece(scores=scores, positions=index + first, live=index < seen),
            ]
            compact(pieces, choose_best(pieces, k, bits), (score_list, position_list), scratch["sums"])
            if block is not None:
                number = (turn * splits + split) * (span // block)
                out = outputs["maxima"].at[group, r, pl.ds(number, span // block)]
                newest = (inputs["visible"][group, r] - 1) // block - number
                _put_maxima(scratch["scores"].at[r], out, seen, newest, block)
            return turn

        def take_turn(turn: Any, carry: Any) -> Any:
            begin = turn * tiles_per_span
            lax.fori_loop(begin, jnp.minimum(begin + tiles_per_span, count), score, 0)
            lax.fori_loop(0, rows, choose, turn)
            return carry

        for r in range(rows):
            empty_lists(lists_of(r))
        pl.when(count > 0)(start)
        lax.fori_loop(0, turns, take_turn, 0)
        for r in range(rows):
            to = pl.ds(split * places, places)
            put_list(lists_of(r), outputs["scores"].at[group, r, to], outputs["positions"].at[group, r, to])

    n = splits * places
    out_types = {
        "scores": jax.ShapeDtypeStruct((groups, rows, n), jnp.float32),
        "positions": jax.ShapeDtypeStruct((groups, rows, n), jnp.int32),
    }
    if block is not None:
        out_types["maxima"] = jax.ShapeDtypeStruct((groups, rows, spans * span // block), jnp.float32)
    bf16_tile, code_tile = _swizzled(8, 64, 128), _swizzled(2, width, width)
    copies = 2 * per_tile if keys.scales is None else per_tile + tile * scale_bytes // _MOST_COPIED
    scratch_types: dict[str, Any] = {
        "queries": plgpu.SMEM((products, dim), jnp.bfloat16, transforms=bf16_tile),
        "weights": plgpu.SMEM((products,), jnp.float32),
        "codes": plgpu.SMEM((stages, tile, width), jnp.uint8, transforms=code_tile),
        "scales": plgpu.SMEM((stages, tile * scale_bytes), jnp.uint8),
        "scores": plgpu.SMEM((rows, span), jnp.float32),
        "score_lists": plgpu.SMEM((rows, places), jnp.float32),
        "position_lists": plgpu.SMEM((rows, places), jnp.int32),
        "sums": plgpu.SMEM((4,), jnp.int32),
        "loaded": plgpu.Barrier(num_arrivals=2),
        "ready": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
    }
    if staged:
        scratch_types["keys"] = plgpu.SMEM((tile, dim), jnp.bfloat16, transforms=bf16_tile)
    if target.is_blackwell:
        scratch_types["dots"] = plgpu.TMEM((tile, products), jnp.float32)
        scratch_types["multiplied"] = plgpu.Barrier(orders_tensor_core=True)
    arrays = {
        "queries": queries, "weights": weights, "codes": codes, "page": keys.page, "visible": visible,
        "scales": pages if keys.scales is None else keys.scales,
    }  # fmt: skip
    if keys.place is not None:
        arrays["place"] = keys.place
    found = plgpu.kernel(
        select_entries_spans, out_type=tuple(out_types.values()), scratch_types=list(scratch_types.values()),
        grid=(groups, splits), grid_names=("group", "split"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane), **kernel_options(),
    )(*arrays.values())  # fmt: skip
    return Kept(scores=found[0], positions=found[1], maxima=found[2] if block is not None else None)


def _swizzled(rows: int, columns: int, swizzle: int) -> Sequence[Any]:
    """Transforms of shared memory. Tiles of codes are 2 rows high, since pages need not be a multiple of 8 rows."""
    tiling, swizzling = plgpu.TilingTransform, plgpu.SwizzleTransform
    return tiling((rows, columns)), swizzling(swizzle)  # type: ignore[abstract]


def _by_name(refs: Sequence[Any], *names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The references in order, as one dictionary per group of names."""
    rest = iter(refs)
    return ({name: next(rest) for name in group} for group in names)


def _decode(codes: Any, scales: Any, tile: int, scale_bytes: int) -> tuple[Array, Array]:
    """bf16 values [tile, width] of the low and of the high nibbles."""
    layout = plgpu.Layout.WGMMA
    per_group = codes.shape[-1] // scale_bytes
    low, high = decode_nibbles(plgpu.layout_cast(plgpu.load(codes, layout=plgpu.Layout.WGMMA_UPCAST_2X), layout))
    lows: list[Array] = []
    highs: list[Array] = []
    for group in range(scale_bytes):
        if is_interpreted():
            byte = scales[...].reshape(tile, scale_bytes)[:, group]
        else:
            byte = plgpu.load(scales.reshape(tile, scale_bytes).at[:, group], layout=layout.reduce(1), optimized=False)
        scale = lax.bitcast_convert_type(lax.shift_left(byte.astype(jnp.int16), jnp.int16(7)), jnp.bfloat16)
        scale = lax.broadcast_in_dim(scale, (tile, per_group), [0])
        for values, scaled in ((low, lows), (high, highs)):
            scaled.append(lax.slice(values, (0, group * per_group), (tile, (group + 1) * per_group)) * scale)
    return lax.concatenate(lows, 1), lax.concatenate(highs, 1)


def _multiply(
    halves: tuple[Array, Array], scratch: dict[str, Any], shape: tuple[int, int], width: int, *, target: GpuTarget,
    staged: bool,
) -> Array:  # fmt: skip
    """Products [tile, N] of the decoded keys and the queries, in f32."""
    queries = scratch["queries"]
    if staged:
        for i, half in enumerate(halves):
            scratch["keys"][:, pl.ds(i * width, width)] = half
    plgpu.commit_smem()  # for the product; and the codes, read by plain loads, are overwritten by a bulk copy
    if target.is_blackwell:
        plgpu.tcgen05_mma(scratch["dots"], scratch["keys"], queries.T, scratch["multiplied"], accumulate=False)
        plgpu.barrier_wait(scratch["multiplied"])
        dots = plgpu.async_load_tmem(scratch["dots"], layout=plgpu.Layout.TCGEN05)
        plgpu.wait_load_tmem()
        return dots

    def accumulate(sums: Any) -> Array:
        if staged:
            wgmma(sums, scratch["keys"], queries.T)
        else:
            for i, half in enumerate(halves):
                wgmma(sums, half, queries.at[:, pl.ds(i * width, width)].T)
        return sums[...]

    return pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.float32))


def _put_maxima(scores: Any, out: Any, seen: Int32[Array, ""], newest: Int32[Array, ""], block: int) -> None:
    """Maxima of the blocks of one row's span, over its first `seen` scores; +inf for block `newest` of the span."""
    layout = plgpu.Layout.WGMMA
    shape = out.shape[0], block
    if is_interpreted():
        by_block = scores[...].reshape(shape)
    else:
        by_block = plgpu.load(scores.reshape(*shape), layout=layout, optimized=False)
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in (0, 1))
    best = plgpu.layout_cast(jnp.max(jnp.where(row * block + column < seen, by_block, -jnp.inf), axis=1),
                             layout.reduce(1))  # fmt: skip
    number = plgpu.broadcasted_iota(jnp.int32, best.shape, 0, layout=layout.reduce(1))
    out[...] = jnp.where(number == newest, jnp.inf, best)
