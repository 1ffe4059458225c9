"""Hyper-connections on a GPU: one pass over the streams (`mosaic_mix`), then norm and Sinkhorn (`mosaic_finish`).

One form serves Hopper and Blackwell. Two kernels, because D is split over blocks, and the norm and the
coefficients need the whole row; the streams themselves are read once and written once.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from widemesh.pallas_kernels.gpu import device_target
from widemesh.pallas_kernels.mhc.fused import Coefficients
from widemesh.pallas_kernels.mhc.mosaic_finish import finish
from widemesh.pallas_kernels.mhc.mosaic_mix import mix
from widemesh.pallas_kernels.mhc.tiles import mix_tiles


def site(
    streams: Float[Array, "T C D"],
    fn: Float[Array, "M CD"],
    base: Float[Array, "M"],
    scale: Float[Array, "3"],
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    rows: int | None = None,
) -> Coefficients:
    """See `op.mhc_site`."""
    t, c, d = streams.shape
    rows = rows or _rows(t, d)
    if t == 0:
        return jnp.zeros((0, c)), jnp.zeros((0, c)), jnp.zeros((0, c, c))
    (partial,) = mix(streams, fn, None, rows=rows)
    settings = {"iterations": iterations, "hc_eps": hc_eps, "norm_eps": norm_eps}
    return finish(partial, base, scale, None, rows=t, hidden=d, dtype=streams.dtype, **settings)[1]  # type: ignore[arg-type]


def advance(
    out: Float[Array, "T D"],
    streams: Float[Array, "T C D"],
    post: Float[Array, "T C"],
    comb: Float[Array, "T C C"],
    pre: Float[Array, "T C"],
    norm_weight: Float[Array, "D"],
    fn: Float[Array, "M CD"],
    base: Float[Array, "M"],
    scale: Float[Array, "3"],
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    rows: int | None = None,
) -> tuple[Float[Array, "T C D"], Float[Array, "T D"], Coefficients]:
    """See `op.mhc_advance`."""
    t, c, d = streams.shape
    rows = rows or _rows(t, d)
    if t == 0:
        return streams, out, (jnp.zeros((0, c)), jnp.zeros((0, c)), jnp.zeros((0, c, c)))
    new, summed, partial = mix(streams, fn, (out, post, comb, pre), rows=rows)
    settings = {"iterations": iterations, "hc_eps": hc_eps, "norm_eps": norm_eps}
    x, found = finish(
        partial,
        base,
        scale,
        (summed, norm_weight),
        rows=t,
        hidden=d,
        dtype=out.dtype,
        **settings,  # type: ignore[arg-type]
    )
    assert x is not None
    return new, x, found


def _rows(t: int, d: int) -> int:
    target = device_target()
    assert target is not None  # or `choose` would not have come here
    return mix_tiles(t, d, target).rows
