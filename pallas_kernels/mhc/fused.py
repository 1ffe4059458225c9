"""Between two sublayers in one go: expand, collapse, norm, and the coefficients of the next site (the reference).

Formulas: docs/model.md, "Single-pass mHC". Roundings follow the dtype of the streams, as the model stores them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from widemesh.pallas_kernels.mhc.reference import coefficients, collapse, expand

Coefficients = tuple[Float[Array, "T C"], Float[Array, "T C"], Float[Array, "T C C"]]  # pre, post, comb


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
) -> tuple[Float[Array, "T C D"], Float[Array, "T D"], Coefficients]:
    """See `op.mhc_advance`."""
    stored = streams.dtype
    entering = expand(out.astype(jnp.float32), streams, post, comb).astype(stored)
    x = collapse(entering, pre).astype(stored).astype(jnp.float32)
    x = norm_weight * (x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + norm_eps))
    site = coefficients(entering, fn, base, scale, iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps)
    return entering, x.astype(stored).astype(out.dtype), site
