"""Tiles of the hyper-connection kernels: a heuristic by shape, overridden by what was tuned on a device."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from widemesh.pallas_kernels.gpu import GpuTarget
from widemesh.pallas_kernels.thread_rows import THREADS, row_width

WARPGROUPS = 4  # of a block of the first kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixTiles:
    """Tiles of the pass over the streams. Raises ValueError for tiles that a block cannot have."""

    rows: int  # of T per block; every warpgroup expands a quarter of them and projects all

    def __post_init__(self) -> None:
        if self.rows not in (8, 16):
            raise ValueError(f"rows={self.rows} must be 8 or 16: a thread keeps rows * mixes / 4 sums in registers")


def mix_tiles(t: int, d: int, target: GpuTarget) -> MixTiles:
    """Tuned tiles of this device and shape, else: 16 rows to a block, 8 if that leaves cores without one.

    More rows share one reading of the projection matrix (2 MB at the released size) but cost registers.
    """
    tuned = _tuned().get(target.name, {}).get(f"{t}x{d}")
    if tuned is not None:
        return MixTiles(**tuned)
    blocks = -(-t // 16) * (d // (THREADS * piece_width(d)))
    return MixTiles(rows=16 if blocks >= target.cores else 8)


def piece_width(d: int) -> int:
    """Values of a piece that a thread holds: as many as 16 bytes of the f32 projection matrix."""
    return row_width(d, "float32", name="hidden")


def _tuned() -> dict[str, dict[str, dict[str, int]]]:
    return json.loads(Path(__file__).with_name("tiles.json").read_text())  # type: ignore[no-any-return]
