"""Inputs of `engram_rows` and `engram_apply`."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from widemesh.pallas_kernels.engram_gate import aot, engram_apply, engram_rows
from widemesh.pallas_kernels.engram_gate.shapes import RELEASED, EngramShape
from widemesh.pallas_kernels.formats import encode_fp8_rows
from widemesh.tools.gpu_check.case import Case, Outcome
from widemesh.tools.gpu_check.cases import draw
from widemesh.tools.gpu_check.compare import close, equal

# Rows are exact in bfloat16. Applying: f32 sums in another order, then bfloat16, where few values go the other way.
_TOLERANCE, _WORST = 1e-3, 3e-3

_DISTINCT_ROWS = 65_521  # a prime: rows past 2^32 bytes do not repeat where offsets would wrap around
_TINY = EngramShape(name="tiny", rows=2, hidden=256, columns=3, table_rows=7)


def _build_rows(key: Array, *, shape: EngramShape) -> tuple[Any, ...]:
    """The first looked-up numbers lie outside the table, on either side."""
    values, sizes, ids = draw.split(key, 3)
    distinct = min(shape.table_rows, _DISTINCT_ROWS)
    size = jnp.exp2(draw.between(sizes, -8, 9, distinct, shape.dim // 32).astype(jnp.float32))
    codes, scales = encode_fp8_rows(draw.normal(values, distinct, shape.dim) * jnp.repeat(size, 32, axis=1))
    table = draw.repeated(jnp.concatenate([codes, scales], axis=1), shape.table_rows)
    number = draw.between(ids, 0, shape.table_rows, shape.rows * shape.columns)
    number = number.at[:2].set(jnp.asarray([-5, shape.table_rows + 9], jnp.int32)[: number.size])
    return table, number.reshape(shape.rows, shape.columns)


def _build_apply(key: Array, *, shape: EngramShape) -> tuple[Any, ...]:
    """Keys resemble the streams, so that gates are far from one half."""
    keys = draw.split(key, 5)
    t, c, d = shape.rows, shape.streams, shape.hidden
    streams = draw.normal(keys[0], t, c, d)
    sign = jnp.where(jnp.arange(c) % 2, 1.0, -1.0)[:, None]
    key_part = (sign * streams + draw.normal(keys[1], t, c, d, scale=0.3)).reshape(t, c * d)
    return (
        streams.astype(jnp.bfloat16),
        jnp.concatenate([key_part, draw.normal(keys[2], t, d)], axis=1).astype(jnp.bfloat16),
        draw.normal(keys[3], c, d, scale=0.1, mean=1.0),
        draw.normal(keys[4], c, d, scale=0.1, mean=1.0),
    )


def _rows(implementation: Any, *args: Array) -> Array:
    return engram_rows(*args, implementation=implementation)


def _apply(implementation: Any, *args: Array) -> Array:
    return engram_apply(*args, eps=1e-20, implementation=implementation)


def _compare_rows(args: tuple[Any, ...], found: Array, wanted: Array) -> tuple[Outcome, ...]:
    return (equal("rows", found, wanted),)


def _compare_apply(args: tuple[Any, ...], found: Array, wanted: Array) -> tuple[Outcome, ...]:
    return (close("streams", found, wanted, tolerance=_TOLERANCE, worst=_WORST),)


def _rows_case(shape: EngramShape, name: str, **fields: Any) -> Case:
    return Case(op="engram_gate", name=f"rows-{name}", build=functools.partial(_build_rows, shape=shape), call=_rows,
                compare=_compare_rows, shared=(0,), **fields)  # fmt: skip


def _apply_case(shape: EngramShape, name: str, **fields: Any) -> Case:
    return Case(op="engram_gate", name=f"apply-{name}", build=functools.partial(_build_apply, shape=shape),
                call=_apply, compare=_compare_apply, **fields)  # fmt: skip


_FLOORS = {case.name: case for case in aot.KERNELS}
_NONE = EngramShape(name="none", rows=0, hidden=256, columns=3, table_rows=7)

CASES = (
    _rows_case(_TINY, "tiny", is_tiny=True),
    _rows_case(_NONE, "none", is_tiny=True),
    _apply_case(_TINY, "tiny", is_tiny=True),
    _apply_case(_NONE, "none", is_tiny=True),
    *(_rows_case(shape, shape.name, floor=_FLOORS[f"rows-{shape.name}"]) for shape in RELEASED),
    *(_apply_case(shape, shape.name, floor=_FLOORS[f"apply-{shape.name}"]) for shape in RELEASED),
)
