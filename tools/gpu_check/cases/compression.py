"""Inputs of `compress_and_store`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from widemesh.pallas_kernels.compress import aot, compress_and_store
from widemesh.pallas_kernels.compress.shapes import RELEASED, CompressShape
from widemesh.pallas_kernels.layout import PageLayout, SourceLayout
from widemesh.tools.gpu_check.case import Case, Outcome
from widemesh.tools.gpu_check.cases import draw
from widemesh.tools.gpu_check.compare import equal

# Of the bytes that change: a value beside the middle between two codes, or between two scales, may go either way.
_SHARE = 5e-3

_RATIOS = (2, 2, 2, 1)
_TINY = CompressShape(name="tiny", requests=3, rows=5, ratio=2, page_size=8, table_pages=6, pages=20, positions=48)


def _layout(shape: CompressShape) -> PageLayout:
    return PageLayout.build(page_size=shape.page_size, ratios=_RATIOS, head_dim=shape.head_dim,
                            index_dim=shape.index_dim, record="packed")  # fmt: skip


def _source(shape: CompressShape) -> SourceLayout:
    return _layout(shape).sources[_RATIOS.index(shape.ratio)]


def _build(key: Array, *, shape: CompressShape, is_full: bool) -> tuple[Any, ...]:
    """In the order of the op's ahead-of-time cases. With `is_full` every request brings all its rows."""
    keys = draw.split(key, 11)
    b, s, h = shape.requests, shape.rows, shape.head_dim
    room = min(shape.table_pages * shape.page_size, shape.positions)
    start = draw.between(keys[0], 0, max(room - s, 1), b)
    length = jnp.full(b, s, jnp.int32) if is_full else draw.between(keys[1], 0, s + 1, b)
    write_from = jnp.where(jnp.arange(b) % 3 == 1, start + s // 2, 0).astype(jnp.int32)
    position = jnp.arange(shape.positions) + draw.uniform(keys[10])  # constants would be folded, for a minute
    angle = position[:, None] * 1e4 ** -(jnp.arange(shape.pairs) / shape.pairs)
    return (
        draw.pages(keys[2], _layout(shape), shape.pages),
        draw.normal(keys[3], b, shape.open_rows, 2, h),
        draw.normal(keys[4], b, s, h),
        draw.normal(keys[5], b, s, h),
        draw.normal(keys[6], h, scale=0.1, mean=1.0),
        draw.normal(keys[7], shape.index_dim, h, scale=h**-0.5, dtype=jnp.bfloat16),
        draw.normal(keys[8], shape.index_dim, scale=0.1, mean=1.0),
        jnp.cos(angle),
        jnp.sin(angle),
        start,
        length,
        jnp.zeros_like(write_from) if is_full else write_from,
        _table(keys[9], shape),
    )


def _table(key: Array, shape: CompressShape) -> Array:
    """Requests share pages where the pool has none to spare: a row of pages per request, far apart."""
    if shape.requests * shape.table_pages <= shape.pages:
        return draw.table(key, shape.requests, shape.table_pages, shape.pages)
    own = draw.shuffled(key, shape.pages).reshape(shape.requests, -1)
    return own[:, jnp.arange(shape.table_pages) % own.shape[1]]


def _call(
    implementation: Any, pages: Array, ring: Array, values: Array, gates: Array, *rest: Array, shape: CompressShape
) -> tuple[Array, Array]:
    *middle, table = rest
    call: Any = functools.partial(compress_and_store, source=_source(shape), eps=1e-20, bf16_rounding=True,
                                  implementation=implementation)  # fmt: skip
    return call(values, gates if shape.ratio > 1 else None, ring, *middle, pages, table)


def _compare(args: tuple[Any, ...], found: Any, wanted: Any) -> tuple[Outcome, ...]:
    changed = float(jnp.sum(wanted[0] != args[0], dtype=jnp.float32))
    return (
        equal("pages", found[0], wanted[0], share=_SHARE, among=changed),
        equal("ring", found[1], wanted[1]),
    )


def _case(shape: CompressShape, name: str, *, is_full: bool = False, **fields: Any) -> Case:
    build, call = functools.partial(_build, shape=shape, is_full=is_full), functools.partial(_call, shape=shape)
    return Case(op="compress", name=name, build=build, call=call, compare=_compare, **fields)


_FLOORS = {case.name: case for case in aot.KERNELS}
_SMALL_POOL: dict[str, Any] = {"pages": 4096, "table_pages": 64, "positions": 4096}

CASES = (
    _case(_TINY, "tiny", is_tiny=True),
    _case(dataclasses.replace(_TINY, ratio=1, rows=3), "tiny, ratio 1", is_tiny=True),
    _case(dataclasses.replace(_TINY, rows=0), "no rows", is_tiny=True),
    _case(dataclasses.replace(RELEASED[1], **_SMALL_POOL), "verify, ragged"),
    _case(dataclasses.replace(RELEASED[3], **_SMALL_POOL), "prefill-ratio-1, ragged"),
    *(_case(shape, shape.name, is_full=True, floor=_FLOORS[shape.name], shared=(7, 8), carried=2)
      for shape in RELEASED),
)  # fmt: skip
