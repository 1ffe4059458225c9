"""Register layouts of kernels in which each of a block's 128 threads works on values of its own.

A vector of D values is cut into D / (128 * w) pieces of 128 x w: thread t of the block holds row t of each piece, w
values that lie side by side in memory (16 bytes where D allows it), so that loads and stores are coalesced, arithmetic
needs no other thread, and a sum over the vector is one addition chain per thread and one exchange at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from widemesh.pallas_kernels.gpu import is_interpreted, swap
from widemesh.pallas_kernels.gpu.store import store

THREADS = 128  # of a block: one warpgroup
SUM_ROWS = 16  # of the layout in which vectors are summed over the threads


def row_width(values: int, dtype: DTypeLike, *, name: str) -> int:
    """How many values of each piece a thread holds: the most that divides `values`, up to 16 bytes of the dtype.

    Raises ValueError for a number of values that 128 threads cannot share.
    """
    if values < THREADS or values % THREADS:
        near = max(round(values / THREADS), 1) * THREADS
        raise ValueError(f"{name}={values} must be a multiple of {THREADS} for the GPU kernel; the nearest is {near}")
    width = 16 // jnp.dtype(dtype).itemsize
    while values % (THREADS * width):
        width //= 2
    return width


def pieces(x: Array, width: int) -> Array:
    """The last axis cut as the module says: [..., D] -> [..., pieces, 128, width]."""
    return x.reshape(*x.shape[:-1], -1, THREADS, width)


def rows_layout(width: int) -> Any:
    """Layout of a piece [128, width]; its sums over axis 1 are [128], one per thread."""
    return plgpu.Layout.TCGEN05_TMEM_NATIVE(width)


def load_rows(ref: Any, width: int) -> Float[Array, "128 width"]:
    """A piece in device memory or SMEM, in registers."""
    return plgpu.load(ref, layout=rows_layout(width), optimized=False)


def load_rows_f32(ref: Any, width: int) -> Float[Array, "128 width"]:
    """The same, widened."""
    return load_rows(ref, width).astype(jnp.float32)


def sum_rows(piece: Float[Array, "... width"], axis: int = 1) -> Float[Array, "..."]:
    """A thread's sum of its row, the last axis, as one chain, so that a product in front of it fuses.

    jax 0.11 has `jnp.sum` only, which keeps its own number of chains.
    """
    if is_interpreted() or not hasattr(plgpu, "sum"):
        return jnp.sum(piece, axis=axis)
    return plgpu.sum(piece, axis=axis, accumulator_ilp=1)


def zero_sums(width: int) -> Float[Array, "128"]:
    """Where a thread's sums over pieces of this width start."""
    return plgpu.layout_cast(jnp.zeros(THREADS, jnp.float32), rows_layout(width).reduce(1))


def store_rows(ref: Any, piece: Float[Array, "128 width"]) -> None:
    """A piece to device memory or SMEM, converted to the dtype there."""
    store(ref, piece.astype(ref.dtype), optimized=False)


def sum_scratch(vectors: int) -> dict[str, Any]:
    """SMEM that `sum_threads` needs for so many vectors, as scratch types of a kernel."""
    rounded = -(-vectors // SUM_ROWS) * SUM_ROWS
    return {
        "parts": plgpu.SMEM((rounded, THREADS), jnp.float32),
        "totals": plgpu.SMEM((rounded,), jnp.float32),
    }


def sum_threads(vectors: Sequence[Float[Array, "128"]], parts: Any, totals: Any) -> None:
    """Sum each vector over the threads of the block; afterwards `totals[i]` is the sum of vector i.

    Rows past the vectors keep what they held. For kernels with `unsafe_no_auto_barriers`: the barriers are here.
    """
    put_parts(vectors, parts)
    store(totals, sum_parts(parts), optimized=False)
    plgpu.commit_smem()


def put_parts(vectors: Sequence[Float[Array, "128"]], parts: Any) -> None:
    """Vectors to SMEM, a row each, between two barriers."""
    plgpu.commit_smem()  # whoever still reads what was there is done
    for i, vector in enumerate(vectors):
        store(parts.at[i], vector, optimized=False)
    plgpu.commit_smem()


def sum_parts(parts: Any) -> Float[Array, "vectors"]:
    """Sums of the rows of `parts` [a multiple of 16, 128] in SMEM: 8 threads to a row."""
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((SUM_ROWS, 32), (4, 32), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )
    return jnp.sum(plgpu.load(parts, layout=layout, optimized=False), axis=1)


for _kernel in ("compress_kernel", "mhc_mix", "mhc_site_mix"):
    swap(kernel=_kernel, missing="plgpu.sum, which sums in one chain", staged="jnp.sum")
