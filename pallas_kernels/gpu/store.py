"""Writing an array to a reference, under every version of jax that the package takes."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def store(ref: Any, value: Any, *, optimized: bool = True) -> None:
    """`ref[...] = value`; an access pattern that is slow raises unless `optimized` is False.

    jax 0.11 has assignment only, which takes every pattern.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=optimized)
    else:
        ref[...] = value
