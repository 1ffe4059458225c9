"""What this very device reaches: a copy through its memory, and dense matrix products on random values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from widemesh.tools.gpu_check.timing import samples

_COPY_BYTES = 1 << 30
_SIZES = (8192, 16_384)


def measure() -> Iterator[dict[str, Any]]:
    """One record per ceiling as it is measured; `per_second` is None with a reason where jax cannot do it."""
    yield _record("copy_bytes", _copies())
    bf16 = _record("bf16_flops", _products(jnp.bfloat16, _plain))
    yield bf16
    fp8 = _record("fp8_flops", (x for form in (_plain, _scaled) for x in _products(jnp.float8_e4m3fn, form)))
    if fp8["per_second"] and bf16["per_second"] and fp8["per_second"] < 1.2 * bf16["per_second"]:
        fp8 |= {"per_second": None, "why": f"{fp8['per_second']:.3g}: jax did not use the FP8 units"}
    yield fp8


def _record(name: str, rates: Iterator[Callable[[], float]]) -> dict[str, Any]:
    """The best of several ways."""
    found, why = [], ""
    for rate in rates:
        try:
            found.append(rate())
        except Exception as error:  # a way that this jax or device does not know
            why = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return {"ceiling": name, "per_second": max(found, default=None)} | ({"why": why} if not found else {})


def _copies() -> Iterator[Callable[[], float]]:
    """Bytes read and bytes written, together."""
    for change in (jnp.copy, lambda x: x ^ np.uint32(1)):

        def rate(change: Any = change) -> float:
            x = jax.random.bits(jax.random.key(0), (_COPY_BYTES // 4,), jnp.uint32)
            copy = jax.jit(change)
            return 2 * _COPY_BYTES / float(np.median(samples(lambda: copy(x))))

        yield rate


def _products(dtype: Any, form: Callable[[Array, Array], Array]) -> Iterator[Callable[[], float]]:
    for size in _SIZES:

        def rate(size: int = size) -> float:
            draw = jax.jit(functools.partial(jax.random.normal, shape=(size, size)))
            a, b = (draw(jax.random.key(i)).astype(dtype) for i in range(2))
            product = jax.jit(form)
            return 2.0 * size**3 / float(np.median(samples(lambda: product(a, b))))

        yield rate


def _plain(a: Array, b: Array) -> Array:
    """a b^T with f32 sums."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def _scaled(a: Array, b: Array) -> Array:
    """The form in which XLA looks for FP8 products: operands widened and scaled."""
    one = jnp.ones((), jnp.bfloat16)
    a, b = (x.astype(jnp.bfloat16) * one for x in (a, b))
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
