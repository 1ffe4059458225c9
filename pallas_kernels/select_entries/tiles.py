"""How the scoring kernel cuts its work."""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources

from widemesh.pallas_kernels.gpu import GpuTarget

_SPAN_STEP = 512  # maxima of 64 blocks of 8, the rows of a register tile
_PRODUCTS = 192  # rows times heads that share a tile of keys: 96 accumulators per thread with wgmma
_BLOCKS_PER_CORE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of one block of threads. Raises ValueError for sizes that the kernels cannot run."""

    keys: int  # per matrix product: 64 or 128 with wgmma, 128 with tcgen05
    span: int  # entries that are scored before the best are chosen
    splits: int  # blocks of threads that share the spans of a group of rows
    rows: int  # query rows that share the keys
    stages: int  # tiles of keys in flight
    chunk: int  # list places that a block narrows at a time

    def __post_init__(self) -> None:
        if self.keys not in (64, 128):
            raise ValueError(f"keys={self.keys} must be 64 or 128")
        if self.span % _SPAN_STEP or self.span < 1:
            nearest = max(_SPAN_STEP, -(-self.span // _SPAN_STEP) * _SPAN_STEP)
            raise ValueError(f"span={self.span} must be a multiple of {_SPAN_STEP}; use {nearest}")
        if self.chunk % 128 or self.chunk < 1:
            raise ValueError(
                f"chunk={self.chunk} must be a multiple of 128; use {max(128, -(-self.chunk // 128) * 128)}"
            )
        if self.rows < 1 or self.splits < 1 or self.stages < 2:
            raise ValueError(
                f"rows={self.rows} and splits={self.splits} must be at least 1 and stages={self.stages} at least 2"
            )

    def smem_bytes(self, *, heads: int, places: int, staged: bool) -> int:
        """Shared memory of a block of the scoring kernel; `staged` if the decoded keys lie there too."""
        queries = self.rows * heads * (256 + 4)
        keys = self.stages * self.keys * 68 + staged * self.keys * 256
        return queries + keys + self.rows * (4 * self.span + 8 * places) + 4096  # alignment, sums, barriers


def choose_tiles(target: GpuTarget, *, requests: int, rows: int, heads: int, entries: int, places: int) -> Tiles:
    """Tiles for `rows` query rows per request and room for `entries`: a tuned entry, else the heuristic.

    A span is as long as lets two blocks share a multiprocessor, so that one chooses while the other multiplies, and at
    most 2048 or what gives every split one, beyond which multiprocessors idle. Where two would leave less than 1024,
    one block takes all shared memory. One or two rows are bound by reading keys and have more of them in flight.
    """
    tuned = _tuned().get(target.name, {}).get(f"requests={requests} rows={rows} heads={heads} entries={entries}")
    if tuned is not None:
        return Tiles(**tuned)
    most = max(1, _PRODUCTS // heads)
    groups = -(-rows // most)
    rows = -(-rows // groups)
    shortest = Tiles(
        keys=128 if target.is_blackwell else 64, span=_SPAN_STEP, rows=rows,
        stages=4 if rows * heads <= 64 else 3, chunk=8192,
        splits=-(-_BLOCKS_PER_CORE * target.cores // (requests * groups)),
    )  # fmt: skip
    even = -(-entries // min(shortest.splits, -(-entries // _SPAN_STEP)))  # entries of a split
    spans = range(min(2048, -(-even // _SPAN_STEP) * _SPAN_STEP), 0, -_SPAN_STEP)
    for blocks, least in ((2, 1024), (1, _SPAN_STEP)):
        for span in spans:
            tiles = dataclasses.replace(shortest, span=span)
            size = tiles.smem_bytes(heads=heads, places=places, staged=target.is_blackwell)
            if span >= min(least, spans[0]) and size <= target.smem_bytes // blocks - 1024:
                return tiles
    return shortest


@functools.cache
def _tuned() -> dict[str, dict[str, dict[str, int]]]:
    """Device name -> shape -> fields, from `tiles.json`."""
    text = resources.files(__package__).joinpath("tiles.json").read_text()
    return json.loads(text)  # type: ignore[no-any-return]
