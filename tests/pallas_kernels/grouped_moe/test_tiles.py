"""Tile sizes: what is legal, the heuristic for the released shapes, tuned entries."""

import dataclasses

import pytest

from widemesh.pallas_kernels.gpu import TARGETS
from widemesh.pallas_kernels.grouped_moe import tiles
from widemesh.pallas_kernels.grouped_moe.shapes import DECODE, PREFILL, TINY, VERIFY
from widemesh.pallas_kernels.grouped_moe.tiles import Tile, Tiles, choose_tiles

TILE = Tile(rows=16, step=128, stages=3)


def chosen(target, shape):
    return choose_tiles(TARGETS[target], rows=shape.rows, pairs=shape.rows * shape.per_token, held=shape.held)


@pytest.mark.parametrize(("target", "rows"), [("H100", (8, 16, 64, 128)), ("B300", (16, 16, 64, 128))])
def test_blocks_grow_with_the_rows_of_an_expert(target, rows):
    found = [chosen(target, shape) for shape in (TINY, DECODE, VERIFY, PREFILL)]
    assert tuple(tile.into.rows for tile in found) == rows
    assert all(tile.out.rows == tile.into.rows for tile in found)


def test_a_tuned_entry_wins(monkeypatch):
    fields = dataclasses.asdict(TILE)
    monkeypatch.setattr(
        tiles, "_tuned", lambda: {"H200": {"rows=512 pairs=3072 held=48": {"into": fields, "out": fields}}}
    )
    assert chosen("H200", DECODE) == Tiles(into=TILE, out=TILE)
    assert chosen("H100", DECODE) != Tiles(into=TILE, out=TILE)


@pytest.mark.parametrize(("change", "message"), [
    ({"rows": 24}, "rows=24 must be 8, 16, 32, 64 or 128"),
    ({"step": 64}, "step=64 must be 128 or 256"),
    ({"stages": 1}, "stages=1 must be at least 2"),
    ({"decoded": 1}, "decoded=1 must be at least 2"),
])  # fmt: skip
def test_illegal_tiles(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TILE, **change)


def test_both_products_share_the_blocks():
    with pytest.raises(ValueError, match=r"into.rows=16 and out.rows=32 must be equal"):
        Tiles(into=TILE, out=dataclasses.replace(TILE, rows=32))


def test_figures_of_the_released_shapes():
    """18.8 MB an expert, all 48 touched in decode; 8, 48 and 256 pairs for each."""
    assert DECODE.expert_bytes == 18_800_640 and DECODE.touched == pytest.approx(48, rel=1e-3)
    assert [shape.pairs / shape.held for shape in (DECODE, VERIFY, PREFILL)] == [8, 48, 256]
    for shape in (DECODE, VERIFY, PREFILL):
        assert shape.floor_bytes < shape.moved_bytes(128) < 3.2 * shape.floor_bytes
    assert DECODE.moved_bytes(16) < 1.1 * DECODE.floor_bytes
