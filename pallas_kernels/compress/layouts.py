"""Register layouts of the compression kernel, and copies between shapes."""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from widemesh.pallas_kernels.gpu import is_interpreted, swap

_WARPS, _LANES = 4, 32


def grid(rows: int, columns: int) -> Any:
    """[rows, columns] with an element per thread; fewer elements than threads repeat."""
    if rows * columns == _WARPS * _LANES:
        return _tiled(((rows, columns), (rows // _WARPS, columns), (1, 1)), (-6,), (-4, -3))
    return small(rows, columns)


def small(rows: int, columns: int) -> Any:
    """[rows, columns] of at most 32 elements, one per lane, the same in all warps; in its last lanes it repeats."""
    lanes: tuple[Any, ...] = (-4, -3)
    if rows * columns < _LANES:
        lanes = (*lanes, plgpu.Replicated(_LANES // (rows * columns)))
    return _tiled(((rows, columns), (rows, columns), (1, 1)), (plgpu.Replicated(_WARPS),), lanes)


def rows16(groups: int) -> Any:
    """[groups, 16] f32 over all threads, 4 lanes to a row, 16 bytes each."""
    return _tiled(((32, 16), (8, 16), (1, 4)), (-6,), (-4, -3)) if groups == 32 else _tiled(
        ((16, 16), (4, 16), (1, 2)), (-6,), (-4, -3))  # fmt: skip


def key_rows(key_groups: int) -> Any:
    """[key_groups, 32, 16 n]: a row per thread, 8 values at a time."""
    return _tiled(((key_groups, 32, 8), (1, 32, 8), (1, 1, 8)), (-9,), (-5,))


def load_flat(ref: Any, size: int) -> Array:
    """A reference to `size` bytes of SMEM as a vector, spread over the threads; a short one repeats."""
    if is_interpreted():
        return plgpu.load(ref).reshape(size)
    if size >= 2 * _WARPS * _LANES:
        layout = _tiled(((256,), (64,), (2,)), (-3,), (-2,))
    elif size == 2 * _LANES * 2:
        layout = _tiled(((128,), (32,), (1,)), (-3,), (-2,))
    else:
        wide = 2 if size == 2 * _LANES else 1
        lanes: tuple[Any, ...] = (-2,)
        if size < _LANES:
            lanes = (-2, plgpu.Replicated(_LANES // size))
        layout = _tiled(((size,), (wide,)), (plgpu.Replicated(_WARPS),), lanes)
    return plgpu.load(ref.reshape(size), layout=layout, optimized=False)


def _tiled(tiles: tuple[tuple[int, ...], ...], warps: tuple[Any, ...], lanes: tuple[Any, ...]) -> Any:
    """A layout whose vectors run along the last dimension, in the form that the compiler wants."""
    layout = mgpu.TiledLayout(plgpu.Tiling(tiles), warps, lanes, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


swap(
    kernel="compress_kernel",
    missing="reshape of a reference",
    staged="reshape of the array loaded from it",
)
