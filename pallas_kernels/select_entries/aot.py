"""Cases to compile ahead of time, with the bytes that they move by arithmetic."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from widemesh.pallas_kernels.gpu import TARGETS
from widemesh.pallas_kernels.gpu.aot_case import TCGEN05, WGMMA, AotCase
from widemesh.pallas_kernels.select_entries.mosaic_lists import round_up
from widemesh.pallas_kernels.select_entries.op import select_entries
from widemesh.pallas_kernels.select_entries.shapes import (
    DECODE_8K,
    DECODE_128K,
    DECODE_BLOCKS,
    PREFILL,
    VERIFY_128K,
    SelectShape,
)
from widemesh.pallas_kernels.select_entries.tiles import choose_tiles


def _arguments(shape: SelectShape) -> tuple[jax.ShapeDtypeStruct | None, ...]:
    b, s = shape.requests, shape.rows
    num_pages = b * shape.pages_per_request
    blocks = None if shape.among_blocks is None else jax.ShapeDtypeStruct((b, s, shape.among_blocks), jnp.int32)
    return (
        jax.ShapeDtypeStruct((b, s, shape.heads, shape.dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((b, s, shape.heads), jnp.float32),
        jax.ShapeDtypeStruct((num_pages, shape.layout.page_bytes), jnp.uint8),
        jax.ShapeDtypeStruct((b, shape.pages_per_request), jnp.int32),
        jax.ShapeDtypeStruct((b, s), jnp.int32),
        blocks,
    )


def floor_bytes(shape: SelectShape) -> int:
    """Every key of a request once (of a row, among blocks), queries in and indices out."""
    t = shape.requests * shape.rows
    keys = shape.requests * shape.entries if shape.among_blocks is None else t * shape.among_blocks * shape.block
    results = 4 * (shape.k + (shape.top_blocks or 0) + (shape.among_blocks or 0))
    return 68 * keys + t * (shape.heads * (2 * shape.dim + 4) + results)


def floor_flops(shape: SelectShape) -> int:
    """Products of all rows with all keys that they are scored against."""
    entries = shape.entries if shape.among_blocks is None else shape.among_blocks * shape.block
    return 2 * shape.requests * shape.rows * shape.heads * shape.dim * entries


def moved_bytes(shape: SelectShape) -> int:
    """What the kernels move on an H200, if everything is visible.

    Groups of rows of one request read its keys through the second-level cache where they fit into half of it. Lists
    are written and read once per round of narrowing, at 8 bytes per place; block maxima at 4 bytes.
    """
    target, t = TARGETS["H200"], shape.requests * shape.rows
    places = round_up(shape.k, 128)
    restricted = shape.among_blocks is not None
    entries = shape.entries if shape.among_blocks is None else shape.among_blocks * shape.block
    requests, rows = (t, 1) if restricted else (shape.requests, shape.rows)
    tiles = choose_tiles(target, requests=requests, rows=rows, heads=shape.heads, entries=entries, places=places)
    groups = -(-rows // tiles.rows)
    if requests * entries * 68 <= target.l2_bytes // 2:
        groups = 1
    keys = requests * groups * entries * (64 + (3 if restricted else 1) * 4)  # gathered scales are written and read
    splits = min(tiles.splits, -(-entries // tiles.span))
    lists = t * _narrowing(splits * places, places, tiles.chunk, first=8)
    if shape.top_blocks is not None:
        lists += t * _narrowing(entries // shape.block, round_up(shape.top_blocks, 128), tiles.chunk, first=4)
    return keys + 2 * lists + floor_bytes(shape) - 68 * requests * entries


def _narrowing(size: int, places: int, chunk: int, *, first: int) -> int:
    """Bytes of all lists of one row: the first at `first` bytes per place, what each round leaves at 8."""
    total = size * first
    while True:
        size = -(-size // min(max(chunk, 2 * places), round_up(size, 128))) * places
        total += 8 * size
        if size == places:
            return total


def _case(name: str, shape: SelectShape) -> AotCase:
    function = functools.partial(
        select_entries, source=shape.source, k=shape.k, block=shape.block, top_blocks=shape.top_blocks,
        implementation="mosaic",
    )  # fmt: skip
    return AotCase(
        name=name,
        op="select_entries",
        shape=shape.name,
        function=function,
        args=_arguments(shape),
        floor_bytes=floor_bytes(shape),
        floor_flops=floor_flops(shape),
        moved_bytes=moved_bytes(shape),
        mma={"sm_90a": WGMMA, "sm_100a": TCGEN05},
    )


KERNELS: tuple[AotCase, ...] = (
    _case("decode_8k", DECODE_8K),
    _case("decode_128k", DECODE_128K),
    _case("decode_blocks", DECODE_BLOCKS),
    _case("verify_128k", VERIFY_128K),
    _case("prefill", PREFILL),
)
