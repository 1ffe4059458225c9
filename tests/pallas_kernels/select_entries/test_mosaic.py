"""The GPU kernels in the interpreter, with race detection, against the reference."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.pallas_kernels.select_entries.inputs import arguments, grid_values
from widemesh.pallas_kernels.gpu import TARGETS, interpreted
from widemesh.pallas_kernels.select_entries import mosaic, select_entries, shapes
from widemesh.pallas_kernels.select_entries import tiles as tiles_module
from widemesh.pallas_kernels.select_entries.mosaic_lists import narrow
from widemesh.pallas_kernels.select_entries.tiles import Tiles
from widemesh.pallas_kernels.select_topk import select_indices


def inputs(shape, seed=0):
    """Random arguments of a shape; every table ends in holes behind what `visible` reaches."""
    queries, weights, pages, table, _ = arguments(
        b=shape.requests, s=shape.rows, heads=shape.heads, dim=shape.dim, pages=shape.pages_per_request,
        page_size=shape.page_size, ratio=shape.ratio, seed=seed,
    )  # fmt: skip
    return queries, weights, pages, table


def source_of(shape):
    return arguments(heads=1, dim=shape.dim, pages=1, page_size=shape.page_size, ratio=shape.ratio)[4]


def with_holes(table, visible, shape, pages):
    """Places of the table that no row reaches, made to point nowhere or at a page of NaN."""
    reached = -(-visible.max(axis=1, keepdims=True) * shape.ratio // shape.page_size)
    holes = np.arange(table.shape[1]) >= reached
    return np.where(holes, np.resize([-1, len(pages) - 1, 10**6], table.shape), table).astype(np.int32)


def compiled(shape, target, monkeypatch, tiles):
    """The op as kernels on `target` with these tiles, and as the reference."""
    options = {"source": source_of(shape), "k": shape.k, "block": shape.block, "top_blocks": shape.top_blocks}
    monkeypatch.setattr(tiles_module, "_tuned", lambda: {target: Anything(tiles)})

    def kernels(*args):
        with interpreted(target):
            return jitted(*args)

    jitted = jax.jit(functools.partial(select_entries, implementation="mosaic", **options))
    return kernels, jax.jit(functools.partial(select_entries, implementation="reference", **options))


class Anything:
    """Tuned tiles of every shape."""

    def __init__(self, tiles):
        self.tiles = tiles

    def get(self, _):
        return self.tiles


def assert_same(found, wanted):
    assert np.array_equal(found.indices, wanted.indices)
    assert (found.blocks is None) == (wanted.blocks is None)
    assert wanted.blocks is None or np.array_equal(found.blocks, wanted.blocks)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN of a page that nobody sees
def test_candidates_are_written(monkeypatch):
    """Requests of several lengths: nothing, less than k, a tile and one more, past one span; holes in the table."""
    shape = shapes.TINY
    tiles = {"keys": 64, "span": 512, "splits": 1, "rows": 1, "stages": 2, "chunk": 256}
    kernels, reference = compiled(shape, "H200", monkeypatch, tiles)
    queries, weights, pages, table = inputs(shape)
    visible = np.int32([[0], [3], [65], [630]])
    args = queries, weights, pages, with_holes(table, visible, shape, pages), visible, None
    found, wanted = kernels(*args), reference(*args)
    assert_same(found, wanted)
    assert (wanted.indices[0] == -1).all() and (wanted.indices[2:] >= 0).all()
    assert (np.diff(np.asarray(wanted.indices)[3, 0]) > 1).any()

    # All scores are equal, then few are distinct: the lower index wins, across spans too.
    args = queries, 0 * weights, pages, table, visible, None
    found = kernels(*args)
    assert_same(found, reference(*args))
    assert (np.asarray(found.indices)[3] == np.arange(shape.k)).all()
    sparse = np.where(np.arange(shape.heads)[:, None] == 3, np.sign(queries) * (np.arange(shape.dim) < 1), 0)
    args = sparse.astype(np.float32), np.abs(weights), pages, table, visible, None
    assert_same(kernels(*args), reference(*args))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_more_rows_than_a_group_and_more_spans_than_splits(monkeypatch):
    """Tensor memory; groups of two of the three rows; pages of 32 keys; two spans dealt to two blocks of threads."""
    shape = shapes.TINY_RATIO_2
    tiles = {"keys": 128, "span": 512, "splits": 2, "rows": 2, "stages": 2, "chunk": 512}
    kernels, reference = compiled(shape, "B200", monkeypatch, tiles)
    queries, weights, pages, table = inputs(shape, seed=1)
    visible = np.int32([[575, 576, 576], [100, 0, 200]])
    args = queries, weights, pages, with_holes(table, visible, shape, pages), visible, None
    assert_same(kernels(*args), reference(*args))


def test_only_entries_of_the_blocks_compete(monkeypatch):
    """Lists of blocks that are full, short and empty; the newest block of a row is seen in part."""
    shape = shapes.TINY_BLOCKS
    tiles = {"keys": 64, "span": 512, "splits": 1, "rows": 1, "stages": 2, "chunk": 256}
    kernels, reference = compiled(shape, "H200", monkeypatch, tiles)
    queries, weights, pages, table = inputs(shape, seed=2)
    rng = np.random.default_rng(0)
    everything = np.sort(rng.permutation(80)[: shape.among_blocks])
    few = np.full(shape.among_blocks, -1)
    few[:4] = [0, 3, 40, 78]
    visible = np.int32([[637], [78 * 8 + 3]])
    for lists, factor in (((everything, few), 1), ((everything, few), 0), ((np.full_like(few, -1), everything), 1)):
        args = queries, factor * weights, pages, table, visible, np.stack(lists)[:, None].astype(np.int32)
        assert_same(kernels(*args), reference(*args))


@pytest.mark.parametrize(("limit", "rows_at_a_time"), [(2 * 4 * 4 * 80, 2), (1, 1)])
def test_block_maxima_are_bounded(monkeypatch, limit, rows_at_a_time):
    """Six rows of four requests with 80 blocks each, with the reference in the place of the kernels."""
    seen = []

    def stand_in(queries, weights, pages, table, visible, *, target, **options):
        seen.append(queries.shape[1])
        return select_entries(queries, weights, pages, table, visible, None, implementation="reference", **options)

    monkeypatch.setattr(mosaic, "_MAXIMA_BYTES", limit)
    monkeypatch.setattr(mosaic, "_among_all", stand_in)
    shape = dataclasses.replace(shapes.TINY, rows=6)
    queries, weights, pages, table = inputs(shape)
    visible = np.arange(24, dtype=np.int32).reshape(4, 6) * 26
    args = queries, weights, pages, table, visible, None
    options = {"source": source_of(shape), "k": shape.k, "block": shape.block, "top_blocks": shape.top_blocks}
    found = mosaic.select_entries_mosaic(*args, target=TARGETS["H200"], **options)
    assert set(seen) == {rows_at_a_time}
    assert_same(found, select_entries(*args, implementation="reference", **options))


def test_lists_are_narrowed_in_rounds():
    rng = np.random.default_rng(0)
    scores = rng.integers(-9, 9, (3, 700)).astype(np.float32)
    scores[1], scores[2, 5:] = -np.inf, 0
    scores[0, ::3] *= -0.0
    positions = np.stack([rng.permutation(700) for _ in range(3)]).astype(np.int32)
    with interpreted():
        found = jax.jit(lambda *args: narrow(*args, 100, chunk=256, num_positions=700))(
            scores, np.where(scores == -np.inf, -1, positions)
        )
    in_order = np.empty_like(scores)
    np.put_along_axis(in_order, positions, scores, axis=1)
    assert np.array_equal(found, select_indices(in_order, 100))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": 96}, "keys=96 must be 64 or 128"),
        ({"span": 700}, "span=700 must be a multiple of 512; use 1024"),
        ({"chunk": 100}, "chunk=100 must be a multiple of 128; use 128"),
        ({"stages": 1}, "stages=1 at least 2"),
    ],
)
def test_tiles_that_cannot_run_are_refused(change, message):
    fields = {"keys": 64, "span": 512, "splits": 1, "rows": 1, "stages": 2, "chunk": 128} | change
    with pytest.raises(ValueError, match=message):
        Tiles(**fields)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("rows", [1, 2, 6, 2048])
def test_heuristic_tiles_fit(rows, target):
    found = tiles_module.choose_tiles(target, requests=64, rows=rows, heads=32, entries=131_072, places=512)
    assert found.rows * 32 <= 256 and -(-rows // found.rows) * found.rows - rows < found.rows
    assert found.smem_bytes(heads=32, places=512, staged=target.is_blackwell) <= target.smem_bytes
    assert found.keys == (128 if target.is_blackwell else 64)
    assert found.span <= 2048


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"record": "f32"}, "key.code='f32' cannot be read by the GPU kernel; use 'mxfp4'"),
        ({"dim": 64}, "index dim 64 of the queries must be 128"),
        ({"heads": 100}, "index heads=100 must be a multiple of 32 up to 256"),
        ({"page_size": 128}, "128 keys per page must be 32 or 64 for the GPU kernel; use page_size=64"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused(change, message):
    queries, weights, pages, table, source = arguments(**{"dim": 128, "page_size": 64} | change)
    with interpreted(), pytest.raises(ValueError, match=message):
        select_entries(queries, weights, pages, table, np.ones((2, 1), np.int32), None, source=source, k=1, block=8,
                       top_blocks=None)  # fmt: skip


def test_values_of_the_grid_are_exact():
    """What makes the comparisons above exact: every value is a small multiple of 1/4."""
    values = grid_values(np.random.default_rng(0), (64, 64))
    assert (values * 4 == np.round(values * 4)).all() and np.abs(values).max() == 12
