"""Inputs of `grouped_moe_packed`: one rank's experts, and rows of all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

from widemesh.pallas_kernels.grouped_moe import ExpertMath, PackedExperts, PackedMatrix, aot, grouped_moe_packed
from widemesh.pallas_kernels.grouped_moe.shapes import DECODE, PREFILL, TINY_BLACKWELL, VERIFY, MoeShape
from widemesh.tools.gpu_check.case import Case, Outcome
from widemesh.tools.gpu_check.cases import draw
from widemesh.tools.gpu_check.compare import close, equal

# Activations are rounded to FP8 and bfloat16 inside. A sum in another order moves a value beside the middle between
# two of them to its neighbour: 2^-4 of a few values in a thousand.
_TOLERANCE, _WORST = 5e-3, 1e-2

_MATH = ExpertMath(limit=10.0, act_quant=True, bf16_rounding=True)
Choose = Callable[[Array, MoeShape], Int32[Array, "T K"]]


def _even(key: Array, shape: MoeShape) -> Int32[Array, "T K"]:
    """Different experts of all ranks, equally likely, at even distances; those of other ranks are -1."""
    first, step = draw.split(key, 2)
    total = shape.held * shape.ranks
    distance = draw.between(step, 1, max(total // shape.per_token, 2), shape.rows, 1)
    experts = (draw.between(first, 0, total, shape.rows, 1) + distance * jnp.arange(shape.per_token)) % total
    return jnp.where(experts < shape.held, experts, -1).astype(jnp.int32)


def _crowded(key: Array, shape: MoeShape) -> Int32[Array, "T K"]:
    """Every row on one expert, some on a second one, the rest outside on either side; most experts have no row."""
    rest = draw.between(key, -2, 2, shape.rows, shape.per_token)
    return jnp.where(rest == 1, shape.held + 3, rest).at[:, 0].set(shape.held - 1)


def _nobody(key: Array, shape: MoeShape) -> Int32[Array, "T K"]:
    """No expert that is held here."""
    return jnp.full((shape.rows, shape.per_token), -1, jnp.int32)


def _build(key: Array, *, shape: MoeShape, choose: Choose) -> tuple[Any, ...]:
    keys = draw.split(key, 6)
    into, out = (shape.held, shape.width, shape.hidden), (shape.held, shape.hidden, shape.width)
    weights = 0.1 + draw.uniform(keys[0], shape.rows, shape.per_token)
    return (
        draw.normal(keys[1], shape.rows, shape.hidden, dtype=jnp.bfloat16),
        choose(keys[2], shape),
        1.5 * weights / jnp.sum(weights, axis=-1, keepdims=True),
        PackedExperts(w1=_matrix(keys[3], into), w3=_matrix(keys[4], into), w2=_matrix(keys[5], out)),
    )


def _matrix(key: Array, shape: tuple[int, int, int]) -> PackedMatrix:
    """Values whose product with a row of ones' size is near 1: E2M1 has a root mean square of 2.9."""
    held, rows, columns = shape
    codes, scales = draw.split(key, 2)
    power = 127 - round(math.log2(2.9 * math.sqrt(columns)))
    return PackedMatrix(
        codes=draw.octets(codes, held, rows, columns // 2),
        scales=draw.between(scales, power - 1, power + 2, held, rows, columns // 32, dtype=jnp.uint8),
    )


def _call(implementation: Any, *args: Any) -> tuple[Array, Array]:
    return functools.partial(grouped_moe_packed, math=_MATH, implementation=implementation)(*args)


def _compare(args: tuple[Any, ...], found: Any, wanted: Any) -> tuple[Outcome, ...]:
    return (
        close("out", found[0], wanted[0], tolerance=_TOLERANCE, worst=_WORST),
        equal("rows_per_slot", found[1], wanted[1]),
    )


def _case(shape: MoeShape, name: str, choose: Choose = _even, **fields: Any) -> Case:
    build = functools.partial(_build, shape=shape, choose=choose)
    return Case(op="grouped_moe", name=name, build=build, call=_call, compare=_compare, **fields)


_FLOORS = {case.name: case for case in aot.KERNELS}

CASES = (
    _case(TINY_BLACKWELL, "tiny", is_tiny=True),
    _case(TINY_BLACKWELL, "tiny, crowded", _crowded, is_tiny=True),
    _case(TINY_BLACKWELL, "tiny, nobody", _nobody, is_tiny=True),
    _case(DECODE, "decode, crowded", _crowded),
    *(_case(shape, shape.name, floor=_FLOORS[shape.name]) for shape in (DECODE, VERIFY, PREFILL)),
)
