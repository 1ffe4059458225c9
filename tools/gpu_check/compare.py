"""Errors of one output, computed on the device: a norm per row, so that a single wrong row shows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from widemesh.tools.gpu_check.case import Outcome


def close(name: str, found: Array, wanted: Array, *, tolerance: float, worst: float, value_axes: int = 1) -> Outcome:
    """||found - wanted|| / ||wanted||, of everything and of the worst row; a row is the last `value_axes` axes.

    A row whose reference is zero must be zero. Shapes that differ, NaN and infinity are errors of infinity.
    """
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return Outcome(name=f"{name}: {found.dtype}{found.shape} instead of {wanted.dtype}{wanted.shape}",
                       error=np.inf, worst=np.inf, tolerance=tolerance, worst_tolerance=worst)  # fmt: skip
    off, size = (np.asarray(x, np.float64).reshape(-1) for x in _squares(found, wanted, value_axes))
    rows = np.where(off == 0, 0.0, np.sqrt(off) / np.sqrt(np.where(size == 0, np.finfo(float).tiny, size)))
    total = np.sqrt(off.sum() / size.sum()) if off.sum() else 0.0
    if not (np.isfinite(off).all() and np.isfinite(size).all()):
        total = np.inf
    return Outcome(name=name, error=float(total), worst=float(rows.max(initial=0.0)), tolerance=tolerance,
                   worst_tolerance=worst)  # fmt: skip


def equal(name: str, found: Array, wanted: Array, *, share: float = 0.0, among: float | None = None) -> Outcome:
    """Elements that differ over all of them (or over `among`), at most `share`."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return close(name, found, wanted, tolerance=share, worst=share)
    differing = float(jnp.sum(found != wanted, dtype=jnp.float32))  # NaN differs from itself
    error = differing / max(found.size if among is None else among, 1.0)
    return Outcome(name=name, error=error, worst=error, tolerance=share, worst_tolerance=share)


def _squares(found: Array, wanted: Array, value_axes: int) -> tuple[Float[Array, "rows"], Float[Array, "rows"]]:
    """Sums of squares of every row, of the difference and of the reference."""
    axes = tuple(range(found.ndim - value_axes, found.ndim))

    @jax.jit
    def both(found: Array, wanted: Array) -> tuple[Array, Array]:
        found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
        return jnp.sum((found - wanted) ** 2, axis=axes), jnp.sum(wanted**2, axis=axes)

    return both(found, wanted)
