"""Into how many parts the keys of a row are split: a heuristic by shape, overridden by what was tuned on a device."""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources

from widemesh.pallas_kernels.gpu import GpuTarget


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How one call is cut."""

    splits: int  # blocks of threads that share the keys of one row and 64 heads

    def __post_init__(self) -> None:
        if self.splits < 1:
            raise ValueError(f"splits={self.splits} must be at least 1")


def choose_tiles(target: GpuTarget, *, rows: int, blocks: int) -> Tiles:
    """For `rows` rows times groups of 64 heads with `blocks` blocks of keys each: a tuned entry, else the heuristic.

    A core holds one block of threads at a time, so rows are split until every core has one, and no further: parts cost
    256 KB of float32 each way.
    """
    tuned = _tuned().get(target.name, {}).get(f"rows={rows} blocks={blocks}")
    if tuned is not None:
        return Tiles(**tuned)
    return Tiles(splits=max(1, min(blocks, target.cores // max(rows, 1))))


@functools.cache
def _tuned() -> dict[str, dict[str, dict[str, int]]]:
    """Device name -> shape -> fields, from `tiles.json`."""
    text = resources.files(__package__).joinpath("tiles.json").read_text()
    return json.loads(text)  # type: ignore[no-any-return]
