"""Inputs of `attend_packed`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from widemesh.pallas_kernels.paged_cache import encode_vectors
from widemesh.pallas_kernels.sparse_attention import aot, attend_packed
from widemesh.pallas_kernels.sparse_attention.shapes import DECODE, PREFILL, VERIFY, AttendShape
from widemesh.tools.gpu_check.case import Case, Outcome
from widemesh.tools.gpu_check.cases import draw
from widemesh.tools.gpu_check.compare import close

# The result is rounded to bfloat16 (a relative error of 2^-9 / sqrt(3) = 1.1e-3 in the norm) on both sides, of which
# few values differ; weights and queries have 11 bits in the kernel, 5e-4 in the norm before that rounding.
_TOLERANCE, _WORST = 2e-3, 5e-3

_TINY = AttendShape(name="tiny", requests=3, rows=2, kept=24, k=70, window=16, page_size=8, pages_per_request=40)


def _build(key: Array, *, shape: AttendShape, is_ring: bool, sees_nothing: bool) -> tuple[Any, ...]:
    keys = draw.split(key, 8)
    b, s, layout = shape.requests, shape.rows, shape.layout
    room = shape.pages_per_request * shape.page_size - s
    start = draw.lengths(keys[0], min(4 * shape.k, room // 2), room, b)
    first = jnp.where(draw.between(keys[1], 0, 4, b) == 0, jnp.maximum(start - shape.window // 2, 0), 0)
    visible = (start[:, None] + jnp.arange(s) + 1) // shape.source.ratio
    indices = draw.chosen(keys[2], visible, shape.k)
    if sees_nothing:  # request 0 sees no key at all, the others see their window alone
        first, indices = first.at[:1].set(start[:1] + s), jnp.full_like(indices, -1)
    count = max(b, 1) * shape.pages_per_request
    rows = encode_vectors(draw.normal(keys[3], b, shape.kept, shape.dim), layout.window)
    return (
        draw.normal(keys[4], b, s, shape.heads, shape.dim, scale=2.0, dtype=jnp.bfloat16),
        rows,
        jnp.zeros(b, jnp.int32) if is_ring else start - (shape.window - 1),
        start,
        first.astype(jnp.int32),
        draw.pages(keys[5], layout, count),
        draw.table(keys[6], b, shape.pages_per_request, count),
        indices,
        draw.normal(keys[7], shape.heads),
    )


def _call(implementation: Any, *args: Array, shape: AttendShape) -> Array:
    return attend_packed(*args, source=shape.source if shape.k else None, window_layout=shape.layout.window,
                         window=shape.window, implementation=implementation)  # fmt: skip


def _compare(args: tuple[Any, ...], found: Array, wanted: Array) -> tuple[Outcome, ...]:
    """A row is one head of one query."""
    return (close("out", found, wanted, tolerance=_TOLERANCE, worst=_WORST),)


def _case(shape: AttendShape, name: str, *, sees_nothing: bool = False, **fields: Any) -> Case:
    is_ring = shape.rows < shape.window
    build = functools.partial(_build, shape=shape, is_ring=is_ring, sees_nothing=sees_nothing)
    call = functools.partial(_call, shape=shape)
    return Case(op="sparse_attention", name=name, build=build, call=call, compare=_compare, shared=(5,), **fields)


_FLOORS = {case.name: case for case in aot.KERNELS}
_RAGGED = dataclasses.replace(_TINY, requests=5, rows=1, pages_per_request=12)

CASES = (
    _case(_TINY, "tiny", is_tiny=True),
    _case(_RAGGED, "tiny, nothing selected and nothing seen", sees_nothing=True, is_tiny=True),
    _case(dataclasses.replace(_TINY, k=0, rows=1), "tiny, without a source", is_tiny=True),
    _case(dataclasses.replace(_TINY, requests=0), "no requests", is_tiny=True),
    _case(dataclasses.replace(DECODE, requests=3, pages_per_request=7), "three requests, short tables"),
    _case(DECODE, "decode", floor=_FLOORS["decode"]),
    _case(VERIFY, "verify", floor=_FLOORS["verify"]),
    _case(PREFILL, "prefill", floor=_FLOORS["prefill"]),
)
