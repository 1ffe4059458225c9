"""Tile sizes of the grouped products: a frozen config, a heuristic by shape, and tuned entries that override it."""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources

from widemesh.pallas_kernels.gpu import GpuTarget

FEATURES = 128  # output features of a tile: 64 even ones for one warpgroup, 64 odd ones for the other
GROUP = 32  # values under one scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """How one grouped product is cut."""

    rows: int  # of a block: the narrow side of the matrix instruction
    step: int  # input columns per pipeline stage
    stages: int
    scale_buffers: int = 1  # tiles whose scales are in shared memory at a time
    decoded: int = 3  # Blackwell: decoded tiles of one matrix and stage in shared memory

    def __post_init__(self) -> None:
        if self.rows not in (8, 16, 32, 64, 128):
            raise ValueError(f"rows={self.rows} must be 8, 16, 32, 64 or 128")
        if self.step not in (128, 256):
            raise ValueError(f"step={self.step} must be 128 or 256")
        for name, value, least in (
            ("stages", self.stages, 2), ("scale_buffers", self.scale_buffers, 1), ("decoded", self.decoded, 2)
        ):  # fmt: skip
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Both products of an expert; they share the blocks, hence the rows."""

    into: Tile  # gate and up
    out: Tile  # down

    def __post_init__(self) -> None:
        if self.into.rows != self.out.rows:
            raise ValueError(f"into.rows={self.into.rows} and out.rows={self.out.rows} must be equal")


def choose_tiles(target: GpuTarget, *, rows: int, pairs: int, held: int) -> Tiles:
    """Tiles for `pairs` (row, k) pairs from `rows` rows on `held` experts: a tuned entry, else the heuristic."""
    tuned = _tuned().get(target.name, {}).get(f"rows={rows} pairs={pairs} held={held}")
    if tuned is not None:
        return Tiles(into=Tile(**tuned["into"]), out=Tile(**tuned["out"]))
    # Pairs whose expert is held elsewhere are among them (7 of 8 on 8 ranks), so an expert sees fewer than this.
    crowd = pairs / held
    block = next((rows for rows, most in ((8, 16), (16, 128), (32, 256), (64, 512)) if crowd <= most), 128)
    if target.is_blackwell:  # a block is no narrower than 16; a decoded tile takes 32 KiB
        block = max(block, 16)
        into, out, decoded = {16: (3, 6, 3), 32: (3, 5, 3), 64: (2, 3, 3), 128: (2, 2, 2)}[block]
        return Tiles(
            into=Tile(rows=block, step=128, stages=into, decoded=decoded),
            out=Tile(rows=block, step=128, stages=out, scale_buffers=2, decoded=decoded),
        )
    if block <= 16:  # bound by reading weights: long stages, so that a row's segment is a whole line of 128 bytes
        return Tiles(
            into=Tile(rows=block, step=256, stages=3, scale_buffers=2),
            out=Tile(rows=block, step=256, stages=6, scale_buffers=2),
        )
    into, out = {32: (5, 8), 64: (4, 6), 128: (3, 3)}[block]
    return Tiles(into=Tile(rows=block, step=128, stages=into), out=Tile(rows=block, step=128, stages=out))


@functools.cache
def _tuned() -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """Device name -> shape -> fields, from `tiles.json`."""
    text = resources.files(__package__).joinpath("tiles.json").read_text()
    return json.loads(text)  # type: ignore[no-any-return]
