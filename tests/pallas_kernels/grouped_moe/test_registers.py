"""What the register code takes for granted about layouts: which value of an array each thread's registers hold."""

import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

LAYOUT = plgpu.Layout


def held(layout, shape):
    """Flat indices of the array's values by [warp, lane, *register axes, element]."""
    values, tiled = np.arange(np.prod(shape)).reshape(shape), layout.to_mgpu()
    for tile in tiled.tiling.tiles:
        lead, inner = values.shape[: values.ndim - len(tile)], values.shape[values.ndim - len(tile) :]
        split = [size for outer in zip(inner, tile, strict=True) for size in (outer[0] // outer[1], outer[1])]
        values = values.reshape(*lead, *split)
        order = [*range(0, 2 * len(tile), 2), *range(1, 2 * len(tile), 2)]
        values = values.transpose(*range(len(lead)), *(len(lead) + axis for axis in order))
    rank = values.ndim
    moved = [rank + d for d in (*tiled.warp_dims, *tiled.lane_dims) if isinstance(d, int)]
    vector = rank + tiled.vector_dim
    rest = [axis for axis in range(rank) if axis not in (*moved, vector)]
    registers = [1 if axis in moved or axis == vector else values.shape[axis] for axis in range(rank)]
    arranged = values.transpose(*moved, *rest, vector)
    return arranged.reshape(*[values.shape[axis] for axis in moved], *registers, values.shape[vector])


def test_registers_have_the_axes_that_the_code_indexes():
    for layout, shape, rows in ((LAYOUT.WGMMA, (64, 32), 2), (LAYOUT.TCGEN05, (128, 32), 4)):
        assert layout.to_mgpu().registers_shape(shape)[:5] == (1, 4, 1, 1, rows)
    assert LAYOUT.WGMMA_8BIT.to_mgpu().registers_shape((64, 64))[:5] == (1, 4, 1, 1, 2)


@pytest.mark.parametrize(("layout", "rows", "side"), [(LAYOUT.WGMMA, 64, 2), (LAYOUT.TCGEN05, 128, 4)])
def test_a_warp_holds_a_quarter_of_the_rows(layout, rows, side):
    """Lane 4 r + p holds columns 2 p and 2 p + 1 of rows r, r + 8, ...: what the shuffles over 4, 8 and 16 reduce."""
    columns = 16
    of = held(layout, (rows, columns))  # [warp, 8, 4, 1, columns / 8, 1, 1, side, ...]
    of = of.reshape(4, 8, 4, columns // 8, side, 2)
    warp, row, pair, column, block, element = np.indices(of.shape)
    expected = (warp * (rows // 4) + block * 8 + row) * columns + column * 8 + pair * 2 + element
    np.testing.assert_array_equal(of, expected)


def test_decoded_bytes_are_in_order():
    """Two bytes of a register in the layout WGMMA become the four columns of the same register in WGMMA_8BIT."""
    codes, values = held(LAYOUT.WGMMA, (64, 32)), held(LAYOUT.WGMMA_8BIT, (64, 64))
    assert codes.shape[:-1] == values.shape[:-1] and (codes.shape[-1], values.shape[-1]) == (2, 4)
    for nibble in range(2):
        np.testing.assert_array_equal(values[..., nibble::2], 2 * codes + nibble)


def test_scales_lie_with_their_rows():
    """Registers 0 and 1 of a row vector belong to rows r and r + 8 of a warp, as axis 4 does."""
    of = held(LAYOUT.WGMMA.reduce(1), (64,))
    of = of.reshape(4, 8, 2)  # the four lanes of a row hold the same
    warp, row, side = np.indices((4, 8, 2))
    np.testing.assert_array_equal(of, warp * 16 + side * 8 + row)
