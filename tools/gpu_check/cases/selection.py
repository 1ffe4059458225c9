"""Inputs of `select_entries`. Their scores are exact in f32 in any order of summation, so the result must be equal."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from widemesh.pallas_kernels.select_entries import aot, select_entries
from widemesh.pallas_kernels.select_entries.selected import Selected
from widemesh.pallas_kernels.select_entries.shapes import (
    DECODE_8K,
    DECODE_128K,
    DECODE_BLOCKS,
    PREFILL,
    TINY,
    TINY_BLOCKS,
    TINY_RATIO_2,
    VERIFY_128K,
    SelectShape,
)
from widemesh.tools.gpu_check.case import Case, Outcome
from widemesh.tools.gpu_check.cases import draw
from widemesh.tools.gpu_check.compare import equal


def _build(key: Array, *, shape: SelectShape) -> tuple[Any, ...]:
    """Queries on the FP4 grid and weights that are multiples of 1/8: products are multiples of 2^-7, below 2^17."""
    keys = draw.split(key, 6)
    b, s = shape.requests, shape.rows
    count = b * shape.pages_per_request
    newest = draw.lengths(keys[0], shape.entries // 2, shape.entries + 1, b)
    visible = jnp.maximum((newest[:, None] * shape.ratio - jnp.arange(s)[::-1]) // shape.ratio, 0).astype(jnp.int32)
    blocks = None
    if shape.among_blocks is not None:
        blocks = draw.chosen(keys[1], (visible + shape.block - 1) // shape.block, shape.among_blocks)
    return (
        draw.fp4_values(keys[2], b, s, shape.heads, shape.dim),
        draw.between(keys[3], -8, 9, b, s, shape.heads, dtype=jnp.float32) / 8,
        draw.pages(keys[4], shape.layout, count),
        draw.table(keys[5], b, shape.pages_per_request, count),
        visible,
        blocks,
    )


def _call(
    implementation: Any, queries: Array, weights: Array, pages: Array, table: Array, visible: Array,
    blocks: Array | None, *, shape: SelectShape,
) -> Selected:  # fmt: skip
    call = functools.partial(select_entries, source=shape.source, k=shape.k, block=shape.block,
                             top_blocks=shape.top_blocks, implementation=implementation)  # fmt: skip
    if implementation != "reference" or not shape.requests:
        return call(queries, weights, pages, table, visible, blocks)

    def one(request: tuple[Any, ...]) -> Selected:
        """All scores of all requests at once would be tens of gigabytes."""
        queries, weights, table, visible, blocks = jax.tree.map(lambda x: x[None], request)
        return jax.tree.map(lambda x: x[0], call(queries, weights, pages, table, visible, blocks))

    return jax.lax.map(one, (queries, weights, table, visible, blocks))


def _compare(args: tuple[Any, ...], found: Selected, wanted: Selected) -> tuple[Outcome, ...]:
    of_blocks = () if wanted.blocks is None else (equal("blocks", found.blocks, wanted.blocks),)  # type: ignore[arg-type]
    return (equal("indices", found.indices, wanted.indices), *of_blocks)


def _case(shape: SelectShape, name: str, **fields: Any) -> Case:
    build, call = functools.partial(_build, shape=shape), functools.partial(_call, shape=shape)
    return Case(op="select_entries", name=name, build=build, call=call, compare=_compare, shared=(2,), **fields)


_FLOORS = {case.name: case for case in aot.KERNELS}
_RELEASED = {"decode_8k": DECODE_8K, "decode_128k": DECODE_128K, "decode_blocks": DECODE_BLOCKS,
             "verify_128k": VERIFY_128K, "prefill": PREFILL}  # fmt: skip

CASES = (
    _case(TINY, "tiny", is_tiny=True),
    _case(TINY_RATIO_2, "tiny, ratio 2", is_tiny=True),
    _case(TINY_BLOCKS, "tiny, among blocks", is_tiny=True),
    _case(dataclasses.replace(DECODE_8K, requests=5, entries=64), "fewer entries than are chosen"),
    _case(dataclasses.replace(VERIFY_128K, requests=3, entries=24_000), "three requests"),
    *(_case(shape, name, floor=_FLOORS[name]) for name, shape in _RELEASED.items()),
)
