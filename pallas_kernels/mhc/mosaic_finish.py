"""What follows the pass over the streams: the norm of the collapsed stream, and Sinkhorn.

    blocks 0 .. tiles - 1     a row of T per lane: 24 mixes from the partial sums, sigmoids, C x C Sinkhorn in registers
    blocks tiles .. + T - 1   x = weight * sum * rsqrt(mean sum^2 + eps) of one row

The sums over the pieces are the only thing that a second kernel is needed for. Bytes: `sum` in, x out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from widemesh.pallas_kernels.gpu import kernel_options
from widemesh.pallas_kernels.gpu.store import store
from widemesh.pallas_kernels.mhc.fused import Coefficients
from widemesh.pallas_kernels.thread_rows import THREADS, load_rows, load_rows_f32, pieces, row_width, store_rows

_LANES, _WARPS = 32, 4


def finish(
    partial: Float[Array, "pieces tiles (M+2)*R"],
    base: Float[Array, "M"],
    scale: Float[Array, "3"],
    collapsed: tuple[Float[Array, "T D"], Float[Array, "D"]] | None,
    *,
    rows: int,
    hidden: int,
    dtype: DTypeLike,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Array | None, Coefficients]:
    """x (None without `collapsed` = (sum, norm weight)) in `dtype`, and the coefficients of T = `rows` rows."""
    (parts, num_tiles, sums), mixes = partial.shape, base.shape[0]
    per_tile, c = sums // (mixes + 2), round((mixes + 1) ** 0.5) - 1
    width = row_width(hidden, jnp.bfloat16, name="hidden")
    num_pieces = hidden // (THREADS * width)
    # A row per lane, the same in all warps.
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((per_tile,), (1,))), warp_dims=(plgpu.Replicated(_WARPS),),
        lane_dims=(-2, plgpu.Replicated(_LANES // per_tile)) if per_tile < _LANES else (-2,), vector_dim=-1,
    )  # fmt: skip

    def site(partial_ref, base_ref, scale_ref, pre, post, comb):  # type: ignore[no-untyped-def]
        tile = lax.axis_index("block")

        def add(part: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
            return tuple(total + load(part, n) for n, total in enumerate(found))

        def load(part: Array | int, n: int) -> Array:
            return plgpu.load(partial_ref.at[part, tile, pl.ds(n * per_tile, per_tile)], layout=layout, optimized=False)

        *found, square = lax.fori_loop(1, parts, add, tuple(load(0, n) for n in range(mixes + 1)))
        inverse_rms = lax.rsqrt(square * (1.0 / (c * hidden)) + norm_eps)
        mix = [found[m] * inverse_rms * scale_ref[min(m // c, 2)] + base_ref[m] for m in range(mixes)]
        at = pl.ds(tile * per_tile, per_tile)
        for k in range(c):
            store(pre.at[at, k], _sigmoid(mix[k]) + hc_eps, optimized=False)
            store(post.at[at, k], 2.0 * _sigmoid(mix[c + k]), optimized=False)
        found = sinkhorn([mix[2 * c + c * j : 3 * c + c * j] for j in range(c)], iterations, hc_eps)
        for j in range(c):
            for k in range(c):
                store(comb.at[at, j, k], found[j][k], optimized=False)

    def norm(partial_ref, sum_ref, weight_ref, x_ref):  # type: ignore[no-untyped-def]
        row = lax.axis_index("block") - num_tiles
        square = jnp.float32(0)
        for part in range(parts):
            square += partial_ref[part, row // per_tile, (mixes + 1) * per_tile + row % per_tile]
        inverse_rms = lax.rsqrt(square * (1.0 / hidden) + norm_eps)
        values = [load_rows_f32(sum_ref.at[row, i], width) for i in range(num_pieces)]
        for i, value in enumerate(values):
            x = load_rows(weight_ref.at[i], width) * (value * inverse_rms)
            store_rows(x_ref.at[row, i], x.astype(sum_ref.dtype))

    padded = num_tiles * per_tile
    shapes = [jax.ShapeDtypeStruct((padded, *shape), jnp.float32) for shape in ((c,), (c,), (c, c))]
    options: dict[str, Any] = {
        "grid_names": ("block",),
        "compiler_params": plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    }
    options |= kernel_options()
    base, scale = base.astype(jnp.float32), scale.astype(jnp.float32)
    if collapsed is None:

        def mhc_site_finish(*refs):  # type: ignore[no-untyped-def]
            site(*refs)

        kernel = plgpu.kernel(mhc_site_finish, out_type=tuple(shapes), grid=(num_tiles,), **options)
        pre, post, comb = kernel(partial, base, scale)
        return None, (pre[:rows], post[:rows], comb[:rows])

    def mhc_finish(partial_ref, base_ref, scale_ref, sum_ref, weight_ref, x_ref, pre, post, comb):  # type: ignore[no-untyped-def]
        is_site = lax.axis_index("block") < num_tiles

        @pl.when(is_site)
        def _() -> None:
            site(partial_ref, base_ref, scale_ref, pre, post, comb)

        @pl.when(jnp.logical_not(is_site))
        def _() -> None:
            norm(partial_ref, sum_ref, weight_ref, x_ref)

    summed, weight = (pieces(array, width) for array in collapsed)
    shape = jax.ShapeDtypeStruct(summed.shape, dtype)
    kernel = plgpu.kernel(mhc_finish, out_type=(shape, *shapes), grid=(num_tiles + rows,), **options)
    x, pre, post, comb = kernel(partial, base, scale, summed, weight.astype(jnp.float32))
    return x.reshape(rows, hidden), (pre[:rows], post[:rows], comb[:rows])


def sinkhorn(logits: list[list[Array]], iterations: int, eps: float) -> list[list[Array]]:
    """`reference.sinkhorn` of a C x C of vectors; the quotients of a line share one reciprocal."""
    c = len(logits)
    comb = []
    for line in logits:
        largest = line[0]
        for value in line[1:]:
            largest = jnp.maximum(largest, value)
        comb.append([jnp.exp(value - largest) for value in line])
    comb = [[value + eps for value in line] for line in _normalised(comb, 0.0)]
    comb = _transposed(_normalised(_transposed(comb), eps))

    def both(_: Array, flat: tuple[Array, ...]) -> tuple[Array, ...]:
        lines = _normalised([list(flat[c * j : c * j + c]) for j in range(c)], eps)
        return tuple(value for line in _transposed(_normalised(_transposed(lines), eps)) for value in line)

    flat = lax.fori_loop(0, iterations - 1, both, tuple(value for line in comb for value in line))
    return [list(flat[c * j : c * j + c]) for j in range(c)]


def _normalised(lines: list[list[Array]], eps: float) -> list[list[Array]]:
    """Each line divided by its sum plus eps."""
    found = []
    for line in lines:
        total = line[0]
        for value in line[1:]:
            total = total + value
        reciprocal = 1.0 / (total + eps)
        found.append([value * reciprocal for value in line])
    return found


def _transposed(lines: list[list[Array]]) -> list[list[Array]]:
    return [list(line) for line in zip(*lines, strict=True)]


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))
