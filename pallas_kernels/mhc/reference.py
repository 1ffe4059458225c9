"""Manifold-constrained hyper-connections: coefficients, collapse and expand of the residual streams.

Formulas: docs/model.md, "Single-pass mHC". T rows, C streams, D hidden. All arithmetic is f32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# A product with 24 outputs takes a CPU longer than one with 32: 1.5 against 1.2 ms at 1024 rows of 4 x 512. With few
# rows the padding itself, a copy of `fn`, would take longer.
_LANES = 16
_PADDED_FROM_ROWS = 256


def coefficients(
    streams: Float[Array, "*T C D"],
    fn: Float[Array, "M CD"],
    base: Float[Array, "M"],
    scale: Float[Array, "3"],
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Float[Array, "*T C"], Float[Array, "*T C"], Float[Array, "*T C C"]]:
    """Pre-mix, post-mix and combination weights of one sublayer site, from the streams that enter it.

    M = C * (C + 2). One RMS statistic runs over all C * D values; it scales the projection, not its input.
    """
    *rows, c, d = streams.shape
    v = streams.reshape(*rows, c * d).astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + norm_eps)
    many = math.prod(rows) >= _PADDED_FROM_ROWS
    wide = jnp.pad(fn, ((0, -fn.shape[0] % _LANES), (0, 0))) if many else fn
    mix = jnp.einsum("...i,mi->...m", v, wide, precision=lax.Precision.HIGHEST)[..., : fn.shape[0]] * inverse_rms
    pre = jax.nn.sigmoid(mix[..., :c] * scale[0] + base[:c]) + hc_eps
    post = 2.0 * jax.nn.sigmoid(mix[..., c : 2 * c] * scale[1] + base[c : 2 * c])
    logits = (mix[..., 2 * c :] * scale[2] + base[2 * c :]).reshape(*rows, c, c)
    return pre, post, sinkhorn(logits, iterations=iterations, eps=hc_eps)


def sinkhorn(logits: Float[Array, "*T C C"], *, iterations: int, eps: float) -> Float[Array, "*T C C"]:
    """Alternate row and column normalisation; the first row step is the softmax, the last step is by columns.

    Axis -2 is the input stream, axis -1 the output stream. The rows of the batch become the minor axis for the
    loop: a [4, 4] minor tile leaves vector units idle (8x slower on a CPU at 1024 rows).
    """
    *rows, c, _ = logits.shape
    comb = jnp.moveaxis(logits.reshape(-1, c, c), 0, -1)  # [input, output, T]
    comb = jnp.exp(comb - _across(jnp.maximum, comb, 1))
    comb = comb / _across(jnp.add, comb, 1) + eps
    comb = _normalise(comb, 0, eps)

    def both(_: int, comb: Float[Array, "C C T"]) -> Float[Array, "C C T"]:
        return _normalise(_normalise(comb, 1, eps), 0, eps)

    comb = lax.fori_loop(0, iterations - 1, both, comb)
    return jnp.moveaxis(comb, -1, 0).reshape(*rows, c, c)


def _normalise(comb: Float[Array, "C C T"], axis: int, eps: float) -> Float[Array, "C C T"]:
    return comb / (_across(jnp.add, comb, axis) + eps)


def _across(combine: Callable[[Array, Array], Array], x: Float[Array, "C C T"], axis: int) -> Float[Array, "..."]:
    """Reduce the few values of an axis one after the other: unlike a reduction it fuses with what follows."""
    return functools.reduce(combine, (lax.slice_in_dim(x, i, i + 1, axis=axis) for i in range(x.shape[axis])))


def collapse(streams: Float[Array, "*T C D"], pre: Float[Array, "*T C"]) -> Float[Array, "*T D"]:
    """Weighted sum of the streams (f32)."""
    c = streams.shape[-2]
    return sum(pre[..., j, None] * streams[..., j, :].astype(jnp.float32) for j in range(c))  # type: ignore[return-value]


def expand(
    out: Float[Array, "*T D"], streams: Float[Array, "*T C D"], post: Float[Array, "*T C"], comb: Float[Array, "*T C C"]
) -> Float[Array, "*T C D"]:
    """New stream k = post[k] * out + sum over input streams j of comb[j, k] * stream j (f32).

    Written as C multiply-adds that fuse into one pass; as an einsum it is a batch of [C, C] matmuls, 3x slower here.
    """
    c = streams.shape[-2]
    x = streams.astype(jnp.float32)
    new = post[..., :, None] * out[..., None, :]
    for j in range(c):
        new = new + comb[..., j, :, None] * x[..., j, None, :]
    return new
