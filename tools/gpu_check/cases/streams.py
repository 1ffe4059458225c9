"""Inputs of `mhc_site` and `mhc_advance`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from widemesh.pallas_kernels.mhc import aot, mhc_advance, mhc_site
from widemesh.pallas_kernels.mhc.shapes import RELEASED, MhcShape
from widemesh.tools.gpu_check.case import Case, Outcome
from widemesh.tools.gpu_check.cases import draw
from widemesh.tools.gpu_check.compare import close

# bfloat16 outputs: few values fall beside the middle between two and go the other way, each by 2^-8. The coefficients
# are f32 sums of 20,480 products of such values; Sinkhorn divides by sums of its own results.
_TOLERANCE, _WORST = 2e-3, 5e-3

_SETTINGS: dict[str, Any] = {"iterations": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}


def _site_arguments(key: Array, shape: MhcShape) -> tuple[Array, Array, Array]:
    """fn, base, scale: mixes near 1."""
    keys = draw.split(key, 3)
    width, mixes = shape.streams * shape.hidden, shape.streams * (shape.streams + 2)
    fn = draw.normal(keys[0], mixes, width, scale=width**-0.5)
    return fn, draw.normal(keys[1], mixes), draw.normal(keys[2], 3)


def _build_site(key: Array, *, shape: MhcShape) -> tuple[Any, ...]:
    streams, site = draw.split(key, 2)
    t, c, d = shape.rows, shape.streams, shape.hidden
    return draw.normal(streams, t, c, d, dtype=jnp.bfloat16), *_site_arguments(site, shape)


def _build_advance(key: Array, *, shape: MhcShape) -> tuple[Any, ...]:
    """comb is near a permutation, so that a wrong axis shows."""
    keys = draw.split(key, 7)
    t, c, d = shape.rows, shape.streams, shape.hidden
    return (
        draw.normal(keys[0], t, d, dtype=jnp.bfloat16),
        draw.normal(keys[1], t, c, d, dtype=jnp.bfloat16),
        jnp.abs(draw.normal(keys[2], t, c)),
        jnp.abs(draw.normal(keys[3], t, c, c, scale=0.1)) + jnp.roll(jnp.eye(c), 1, axis=1),
        jnp.abs(draw.normal(keys[4], t, c)),
        draw.normal(keys[5], d, scale=0.1, mean=1.0),
        *_site_arguments(keys[6], shape),
    )


def _advance(implementation: Any, *args: Array) -> Any:
    return mhc_advance(*args, **_SETTINGS, implementation=implementation)


def _site(implementation: Any, *args: Array) -> Any:
    return mhc_site(*args, **_SETTINGS, implementation=implementation)


def _compare(args: tuple[Any, ...], found: Any, wanted: Any) -> tuple[Outcome, ...]:
    found, wanted = jax.tree.leaves(found), jax.tree.leaves(wanted)
    names = ("new", "x", "pre", "post", "comb")[-len(wanted) :]
    return tuple(
        close(name, a, b, tolerance=_TOLERANCE, worst=_WORST, value_axes=2 if name == "comb" else 1)
        for name, a, b in zip(names, found, wanted, strict=True)
    )


def _case(shape: MhcShape, name: str, *, is_site: bool = False, **fields: Any) -> Case:
    build = functools.partial(_build_site if is_site else _build_advance, shape=shape)
    return Case(op="mhc", name=name, build=build, call=_site if is_site else _advance, compare=_compare, **fields)


_FLOORS = {case.name: case for case in aot.KERNELS}
_DECODE, _, _PREFILL = RELEASED

CASES = (
    _case(MhcShape(name="tiny", rows=9, streams=2, hidden=384), "tiny", is_tiny=True),
    _case(MhcShape(name="tiny", rows=5, hidden=128), "site-tiny", is_site=True, is_tiny=True),
    _case(MhcShape(name="none", rows=0, hidden=128), "no rows", is_tiny=True),
    _case(MhcShape(name="odd", rows=67), "67 rows"),
    _case(MhcShape(name="odd", rows=67), "site-67 rows", is_site=True),
    *(_case(shape, shape.name, floor=_FLOORS[shape.name]) for shape in RELEASED),
    *(_case(shape, f"site-{shape.name}", is_site=True, floor=_FLOORS[f"site-{shape.name}"])
      for shape in (_DECODE, _PREFILL)),
)  # fmt: skip
