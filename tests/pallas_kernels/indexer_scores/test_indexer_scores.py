"""Index scores, whole and in blocks of rows."""

import ml_dtypes
import numpy as np
import pytest

from widemesh.pallas_kernels.indexer_scores import indexer_scores, reference

RNG = np.random.default_rng(0)


def arguments(b=2, s=11, heads=3, dim=8, entries=20):
    """queries, signed weights and keys."""
    shapes = (b, s, heads, dim), (b, s, heads), (b, entries, dim)
    return tuple(RNG.standard_normal(shape).astype(np.float32) for shape in shapes)


def expected(queries, weights, keys):
    """relu per head, then the weights, in float64."""
    dots = np.einsum("bsid,bld->bsil", queries.astype(np.float64), keys)
    return (np.maximum(dots, 0) * weights[..., None]).sum(2)


def test_formula():
    args = arguments()
    found = np.asarray(indexer_scores(*args, ratio=1, start_bound=100))
    np.testing.assert_allclose(found, expected(*args), rtol=1e-4, atol=1e-5)
    assert (found < 0).any()  # the weights are signed


@pytest.mark.parametrize(("ratio", "start_bound", "limit"), [(1, 0, 11), (2, 0, 5), (1, 4, 15), (2, 90, 20), (3, 1, 4)])
def test_entries_beyond_all_rows_are_not_scored(ratio, start_bound, limit):
    """Row S - 1 at the latest start sees (start + S) // ratio entries; what lies past them reads -inf."""
    args = arguments()
    found = np.asarray(indexer_scores(*args, ratio=ratio, start_bound=start_bound))
    np.testing.assert_allclose(found[:, :, :limit], expected(*args)[:, :, :limit], rtol=1e-4, atol=1e-5)
    assert np.isneginf(found[:, :, limit:]).all()


@pytest.mark.parametrize("block", [1, 4, 5, 64])
def test_blocks_of_rows_change_nothing(monkeypatch, block):
    args = arguments()
    whole = np.asarray(indexer_scores(*args, ratio=1, start_bound=0))
    monkeypatch.setattr(reference, "_BLOCK_ROWS", block)
    found = np.asarray(indexer_scores(*args, ratio=1, start_bound=0))
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)


def test_bf16_operands_change_nothing_on_the_grid():
    queries, weights, keys = arguments()
    queries, keys = (x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (queries, keys))
    found = indexer_scores(queries, weights, keys, ratio=1, start_bound=0, bf16_operands=True)
    np.testing.assert_allclose(
        found, indexer_scores(queries, weights, keys, ratio=1, start_bound=0), rtol=1e-5, atol=1e-6
    )


def bf(x):
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("left_out", ["nothing", "dot", "term", "score"])
def test_released_roundings(left_out):
    """The dot of each head, each weighted term and their sum are rounded; leaving one out gives other scores."""
    queries, weights, keys = (bf(x).astype(np.float32) for x in arguments(heads=8, dim=32))
    skip = lambda point: (lambda x: x) if point == left_out else bf  # noqa: E731
    dots = skip("dot")(np.einsum("bsid,bld->bsil", queries.astype(np.float64), keys))
    wanted = skip("score")(skip("term")(np.maximum(dots, 0) * weights[..., None]).sum(2))
    found = np.asarray(indexer_scores(queries, weights, keys, ratio=1, start_bound=99, bf16_rounding=True))
    share = np.mean(found == wanted)
    assert share > 0.99 if left_out == "nothing" else share < 0.9
