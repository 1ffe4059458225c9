"""The GPU kernels in the interpreter, with race detection, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from widemesh.pallas_kernels.formats import encode_mxfp4
from widemesh.pallas_kernels.gpu import interpreted
from widemesh.pallas_kernels.grouped_moe import ExpertMath, PackedExperts, PackedMatrix, grouped_moe_packed
from widemesh.pallas_kernels.grouped_moe.mosaic import moe_packed_mosaic
from widemesh.pallas_kernels.grouped_moe.shapes import TINY, TINY_BLACKWELL
from widemesh.pallas_kernels.grouped_moe.tiles import Tile, Tiles

# Small tiles of the two kinds: blocks that the rows of one expert fill twice, fewer stages than there are steps.
TILES = {
    "H200": Tiles(into=Tile(rows=8, step=128, stages=2), out=Tile(rows=8, step=256, stages=2, scale_buffers=2)),
    "B200": Tiles(into=Tile(rows=16, step=128, stages=2), out=Tile(rows=16, step=128, stages=2, decoded=2)),
}
SHAPES = {"H200": TINY, "B200": TINY_BLACKWELL}
SERVING = ExpertMath(limit=0.5, act_quant=True, bf16_rounding=True)
PLAIN = ExpertMath(limit=0.5)
X = TINY.held


@functools.cache
def operands(target):
    """x and the experts. Scales differ from group to group, so that a scale of the wrong group shows.

    The first 8 outputs see only the odd features of the first group of 32, which are far smaller than its even ones:
    with a scale of their own they would keep what the group's scale rounds away.
    """
    shape, rng = SHAPES[target], np.random.default_rng(0)

    def packed(values):
        codes, scales = encode_mxfp4(values.astype(np.float32))
        return PackedMatrix(codes=jnp.asarray(codes), scales=jnp.asarray(scales))

    def values(rows, columns):
        scale = np.exp2(rng.integers(-5, -1, (X, rows, columns // 32))).repeat(32, axis=-1)
        return rng.standard_normal((X, rows, columns)) * scale

    into = [values(shape.width, shape.hidden) for _ in range(2)]
    for matrix in into:
        matrix[:, 1:32:2] *= 2.0**-10
    out = values(shape.hidden, shape.width)
    out[:, :8] *= (np.arange(shape.width) < 32) & (np.arange(shape.width) % 2 == 1)
    experts = PackedExperts(w1=packed(into[0]), w3=packed(into[1]), w2=packed(out))
    return jnp.asarray(rng.standard_normal((shape.rows, shape.hidden)), jnp.bfloat16), experts


def run(target, slots, math):
    """(kernel, reference): out and counts of each."""
    x, experts = operands(target)
    slots = np.asarray(slots, np.int32)
    x = x[: len(slots)]
    weights = np.random.default_rng(1).random(slots.shape, np.float32) + 0.1
    with interpreted(target):
        found = kernel(target, math)(x, slots, weights, experts)
        found = tuple(np.asarray(array) for array in found)
    return found, tuple(np.asarray(array) for array in reference(math)(x, slots, weights, experts))


@functools.cache
def kernel(target, math):
    return jax.jit(lambda *arrays: moe_packed_mosaic(*arrays, math, tiles=TILES[target]))


@functools.cache
def reference(math):
    return jax.jit(lambda *arrays: grouped_moe_packed(*arrays, math, implementation="reference"))


T = TINY.rows
RAGGED = [[0, 2], [2, -1], [2, 0], [X, 2], [2, 0], [-1, -1], [2, 0], [2, -9], [0, 2], [2, X + 3], [2, 0]]
CASES = {
    "ragged, two blocks of one expert, an expert without rows": RAGGED,
    "all rows on one expert": [[1, -1]] * T,
    "no row chose an expert here": [[-1, X]] * T,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TILES)
def test_serving(target, case):
    """FP8 and bfloat16 roundings: a sum in another order may round some values to a neighbour."""
    (out, counts), (expected, expected_counts) = run(target, CASES[case], SERVING)
    np.testing.assert_array_equal(counts, expected_counts)
    chosen = np.asarray(CASES[case])
    idle = ~((chosen >= 0) & (chosen < X)).any(axis=1)
    assert not out[idle].any() and out.dtype == np.float32
    for outputs in (slice(8), slice(8, None)):
        error = np.linalg.norm((out - expected)[:, outputs], axis=1)
        assert (error <= 5e-3 * np.linalg.norm(expected[:, outputs], axis=1)).all()
    if not idle.all():
        assert np.abs(expected[~idle]).max(axis=1).min() > 0.1, "the case must say something about every row"
        assert np.count_nonzero(expected[~idle, :8]) > 0


@pytest.mark.parametrize("target", TILES)
def test_without_roundings_and_one_expert_per_row(target):
    """K = 1, f32 partial results. The reference keeps the intermediate in f32, the kernel in bfloat16."""
    (out, counts), (expected, _) = run(target, [[2], [-1], [2]], PLAIN)
    np.testing.assert_array_equal(counts, [0, 0, 2])
    error = np.linalg.norm(out - expected, axis=1)
    assert (error <= 5e-3 * np.linalg.norm(expected, axis=1)).all() and np.abs(expected).max() > 0.1


@pytest.mark.parametrize("target", TILES)
def test_no_rows(target):
    x, experts = operands(target)
    with interpreted(target):
        out, counts = grouped_moe_packed(x[:0], np.zeros((0, 2), np.int32), np.zeros((0, 2)), experts, SERVING)
    assert out.shape == (0, x.shape[1]) and not np.asarray(counts).any()


@pytest.mark.parametrize(("target", "unit"), [("H200", 256), ("B200", 512)])
def test_widths_that_tiles_do_not_divide(target, unit):
    x, experts = operands(target)
    fewer = jax.tree.map(lambda array: array[..., : array.shape[-1] // 2], (x, experts.w1, experts.w3))
    short = PackedExperts(w1=fewer[1], w3=fewer[2], w2=jax.tree.map(lambda array: array[:, : unit // 2], experts.w2))
    with (
        interpreted(target),
        pytest.raises(
            ValueError,
            match=f"hidden size {unit // 2} must be a multiple of {unit} for the {target} kernel; pad to {unit}",
        ),
    ):
        grouped_moe_packed(fewer[0], np.zeros((T, 1), np.int32), np.ones((T, 1), np.float32), short, SERVING)
