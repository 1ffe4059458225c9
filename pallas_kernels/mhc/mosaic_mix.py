"""The one pass over the residual streams: expand, collapse and the sums behind the next site's coefficients.

    new[k] = post[k] * out + sum over j of comb[j, k] * streams[j]          stored
    sum    = sum over k of pre[k] * new[k]                                  stored; `mosaic_finish` norms it
    mix[m] = sum over k, d of new[k, d] * fn[m, k, d],  and the sums of squares of `new` and of `sum`

    block = (tile of R rows, piece of D), 4 warpgroups

       streams, out of R/4 rows ──> registers ──> new, sum ──> HBM
       (warpgroup g: rows of its quarter)          └─────────> SMEM [R, C, piece]
                                                                 │  all R rows
       fn of M/4 mixes (from L2, 16 B a thread) ─────────────────┴──> R * M/4 sums a thread
                                                                       └─ SMEM ──> partial sums [piece, tile, M + 2, R]

Floor: streams, out, new and x once: (2 C + 2) D values a row, 100 KiB in bfloat16 at C = 4, D = 5120; bytes bound it
on paper (11 FLOP per byte). Moved: `sum` is written and read once more, 1.2 times the floor; in decode both stay in
L2. `fn` (2 MB, f32) comes from L2 once per tile: 16 rows share it, 256 MiB for 2048 rows. No tensor core: the
projection has 24 columns and f32 weights; its 10^9 multiply-adds at 2048 rows take about as long as the bytes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from widemesh.pallas_kernels.gpu import kernel_options
from widemesh.pallas_kernels.gpu.store import store
from widemesh.pallas_kernels.mhc.tiles import WARPGROUPS, piece_width
from widemesh.pallas_kernels.thread_rows import (
    SUM_ROWS,
    THREADS,
    load_rows,
    load_rows_f32,
    pieces,
    put_parts,
    store_rows,
    sum_parts,
    sum_rows,
    zero_sums,
)

_SUMS = 48  # that a thread keeps at a time, of the R * M/4: all 96 of a tile of 16 rows would spill


def mix(
    streams: Float[Array, "T C D"],
    fn: Float[Array, "M CD"],
    expansion: tuple[Array, Array, Array, Array] | None,
    *,
    rows: int,
) -> tuple[Array, ...]:
    """Partial sums [pieces, tiles, (M + 2) * R] of tiles of R = `rows` rows: the M mixes, squares of new, of sum.

    With `expansion` = (out, post, comb, pre) the new streams and `sum` come before them. Without it the streams are
    what enters the site, and the squares of `sum` mean nothing.
    """
    t, c, d = streams.shape
    mixes, width = c * (c + 2), piece_width(d)
    if mixes % WARPGROUPS:
        raise ValueError(f"streams={c} must be 2 or 4 for the GPU kernel: {WARPGROUPS} warpgroups share {mixes} mixes")
    num_pieces, num_tiles = d // (THREADS * width), -(-t // rows)
    share, own = mixes // WARPGROUPS, rows // WARPGROUPS
    together = min(share, _SUMS // rows)

    def body(streams_ref, fn_ref, out_refs, new_ref, sum_ref, partial_ref, smem):  # type: ignore[no-untyped-def]
        tile, at, group = lax.axis_index("tile"), lax.axis_index("piece"), lax.axis_index("wg")
        kept, squares = smem["kept"], smem["squares"]

        def expand(r: Array, _: None) -> None:
            place = group * own + r
            row = jnp.minimum(tile * rows + place, t - 1)
            if expansion is None:
                new = [load_rows(streams_ref.at[row, k, at], width) for k in range(c)]
            else:
                new, summed = _expanded(streams_ref, out_refs, row, at, width)
                wide = summed.astype(jnp.float32)
                store(squares.at[rows + place], sum_rows(wide * wide), optimized=False)

                @pl.when(tile * rows + place < t)
                def _() -> None:
                    for k in range(c):
                        store_rows(new_ref.at[row, k, at], new[k])
                    store_rows(sum_ref.at[row, at], summed)

            square = zero_sums(width)
            for k in range(c):
                store_rows(kept.at[place, k], new[k])
                wide = new[k].astype(jnp.float32)
                square += sum_rows(wide * wide)
            store(squares.at[place], square, optimized=False)

        lax.fori_loop(0, own, expand, None)
        plgpu.barrier_arrive(smem["written"])
        plgpu.barrier_wait(smem["written"])

        @pl.when(group == 0)
        def _() -> None:
            where = partial_ref.at[at, tile, pl.ds(mixes * rows, 2 * rows)]
            store(where, sum_parts(squares), optimized=False)

        parts = smem["parts"].at[group]
        for begin in range(0, share, together):
            held = range(begin, min(begin + together, share))

            def project(k: Array, sums: tuple[Array, ...], held: range = held) -> tuple[Array, ...]:
                found = list(sums)
                weights = [load_rows(fn_ref.at[group * share + m, k, at], width) for m in held]
                for r in range(rows):
                    x = load_rows_f32(kept.at[r, k], width)
                    for n, weight in enumerate(weights):
                        found[n * rows + r] += sum_rows(x * weight)
                return tuple(found)

            sums = lax.fori_loop(0, c, project, tuple(zero_sums(width) for _ in range(len(held) * rows)))
            for n in range(0, len(held) * rows, SUM_ROWS):
                put_parts(sums[n : n + SUM_ROWS], parts)
                first = (group * share + begin) * rows + n
                store(partial_ref.at[at, tile, pl.ds(first, SUM_ROWS)], sum_parts(parts), optimized=False)

    cut = (num_pieces, THREADS, width)
    partial = jax.ShapeDtypeStruct((num_pieces, num_tiles, (mixes + 2) * rows), jnp.float32)
    options: dict[str, Any] = {
        "scratch_types": {
            "kept": plgpu.SMEM((rows, c, THREADS, width), streams.dtype),
            "squares": plgpu.SMEM((2 * rows, THREADS), jnp.float32),
            "parts": plgpu.SMEM((WARPGROUPS, SUM_ROWS, THREADS), jnp.float32),
            "written": plgpu.Barrier(num_arrivals=WARPGROUPS),
        },
        "grid": (num_tiles, num_pieces),
        "grid_names": ("tile", "piece"),
        "num_threads": WARPGROUPS,
        "thread_name": "wg",
        "compiler_params": plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **kernel_options(),
    }
    cut_streams, cut_fn = pieces(streams, width), pieces(fn.reshape(mixes, c, d), width)
    if expansion is None:

        def mhc_site_mix(streams_ref, fn_ref, partial_ref, **smem):  # type: ignore[no-untyped-def]
            body(streams_ref, fn_ref, None, None, None, partial_ref, smem)

        return (plgpu.kernel(mhc_site_mix, out_type=partial, **options)(cut_streams, cut_fn),)

    def mhc_mix(streams_ref, fn_ref, out_ref, post, comb, pre, new, summed, partial_ref, **smem):  # type: ignore[no-untyped-def]
        body(streams_ref, fn_ref, (out_ref, post, comb, pre), new, summed, partial_ref, smem)

    out, post, comb, pre = expansion
    stored = streams.dtype
    outputs = (jax.ShapeDtypeStruct((t, c, *cut), stored), jax.ShapeDtypeStruct((t, *cut), stored), partial)
    kernel = plgpu.kernel(mhc_mix, out_type=outputs, **options)
    new, summed, partial_sums = kernel(cut_streams, cut_fn, pieces(out, width), post, comb, pre)
    return new.reshape(t, c, d), summed.reshape(t, d), partial_sums


def _expanded(streams_ref: Any, refs: Any, row: Array, at: Array, width: int) -> tuple[list[Array], Array]:
    """The new streams of a row's piece and their weighted sum, as they are stored."""
    out_ref, post, comb, pre = refs
    c = streams_ref.shape[1]
    out = load_rows_f32(out_ref.at[row, at], width)
    streams = [load_rows_f32(streams_ref.at[row, j, at], width) for j in range(c)]
    new, summed = [], None
    for k in range(c):
        value = out * post[row, k]
        for j in range(c):
            value += streams[j] * comb[row, j, k]
        new.append(value.astype(streams_ref.dtype))
        term = new[k].astype(jnp.float32) * pre[row, k]
        summed = term if summed is None else summed + term
    return new, summed.astype(streams_ref.dtype)  # type: ignore[union-attr]
