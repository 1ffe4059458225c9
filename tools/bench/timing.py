"""Timing of compiled JAX programs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def median_s(program: Callable[..., Any], *args: Any, repeat: int) -> float:
    """Median wall seconds of `repeat` calls, each waited for, after one that is not counted."""
    jax.block_until_ready(program(*args))
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matmul_flops(size: int = 2048, repeat: int = 3) -> float:
    """f32 FLOP per second of a square matrix product: the rate that the machine has right now."""
    a = jax.numpy.full((size, size), 0.5)
    return 2 * size**3 / median_s(jax.jit(jax.numpy.matmul), a, a, repeat=repeat)
