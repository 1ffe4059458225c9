"""The hyper-connection kernels at the released shapes, to be compiled ahead of time."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from widemesh.pallas_kernels.gpu.aot_case import AotCase
from widemesh.pallas_kernels.mhc.op import mhc_advance, mhc_site
from widemesh.pallas_kernels.mhc.shapes import RELEASED, MhcShape

_SETTINGS: dict[str, Any] = {"iterations": 20, "hc_eps": 1e-6, "norm_eps": 1e-20, "implementation": "mosaic"}


def _array(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _site_arguments(shape: MhcShape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """fn, base, scale."""
    c, mixes = shape.streams, shape.streams * (shape.streams + 2)
    return _array(mixes, c * shape.hidden), _array(mixes), _array(3)


def _weight_bytes(shape: MhcShape) -> int:
    return 4 * shape.streams * (shape.streams + 2) * shape.streams * shape.hidden


def _advance(shape: MhcShape) -> AotCase:
    t, c, d = shape.rows, shape.streams, shape.hidden
    mixes = c * (c + 2)
    floor = 2 * t * (2 * c + 2) * d + _weight_bytes(shape) + 8 * t * mixes
    partial = 2 * 4 * (d // 512) * t * (mixes + 2)
    return AotCase(
        name=shape.name,
        op="mhc",
        shape=f"T={t} C={c} D={d}",
        function=functools.partial(mhc_advance, **_SETTINGS),
        args=(
            _array(t, d, dtype=jnp.bfloat16), _array(t, c, d, dtype=jnp.bfloat16), _array(t, c), _array(t, c, c),
            _array(t, c), _array(d), *_site_arguments(shape),
        ),
        floor_bytes=floor,
        floor_flops=2.0 * t * d * (c * mixes + c * (c + 1) + c),
        moved_bytes=floor + 2 * 2 * t * d + partial,
    )  # fmt: skip


def _site(shape: MhcShape) -> AotCase:
    t, c, d = shape.rows, shape.streams, shape.hidden
    mixes = c * (c + 2)
    floor = 2 * t * c * d + _weight_bytes(shape) + 4 * t * mixes
    return AotCase(
        name=f"site-{shape.name}",
        op="mhc",
        shape=f"T={t} C={c} D={d}",
        function=functools.partial(mhc_site, **_SETTINGS),
        args=(_array(t, c, d, dtype=jnp.bfloat16), *_site_arguments(shape)),
        floor_bytes=floor,
        floor_flops=2.0 * t * d * c * (mixes + 1),
        moved_bytes=floor + 2 * 4 * (d // 512) * t * (mixes + 2),
    )


KERNELS: tuple[AotCase, ...] = (*(_advance(shape) for shape in RELEASED), _site(RELEASED[0]), _site(RELEASED[-1]))
