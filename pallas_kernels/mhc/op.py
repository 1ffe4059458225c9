"""Dispatch of the hyper-connections between sublayers."""

from __future__ import annotations

from jaxtyping import Array, Float

from widemesh.pallas_kernels.gpu import Implementation, choose
from widemesh.pallas_kernels.mhc.fused import Coefficients, advance
from widemesh.pallas_kernels.mhc.reference import coefficients


def mhc_site(
    streams: Float[Array, "T C D"],
    fn: Float[Array, "M CD"],
    base: Float[Array, "M"],
    scale: Float[Array, "3"],
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
    implementation: Implementation | None = None,
) -> Coefficients:
    """Pre-mix [T, C], post-mix [T, C] and combination [T, C, C] (f32) of the site that `streams` enter.

    M = C * (C + 2) mixes: C for pre, C for post, C * C for comb (input stream by output stream). One RMS statistic
    runs over all C * D values of a row. Raises ValueError when the shapes do not fit each other.
    """
    _check(streams, fn, base, scale)
    if choose("mhc_site", implementation) == "mosaic":
        from widemesh.pallas_kernels.mhc import mosaic

        return mosaic.site(streams, fn, base, scale, iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps)
    return coefficients(streams, fn, base, scale, iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps)


def mhc_advance(
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
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T C D"], Float[Array, "T D"], Coefficients]:
    """The step from one sublayer to the next, in one pass over the streams.

        new[k] = post[k] * out + sum over j of comb[j, k] * streams[j]
        x      = norm_weight * rmsnorm(sum over k of pre[k] * new[k])
        site   = coefficients of `new` (see `mhc_site`)

    Returns (new, x, site). `post` and `comb` are those of the site that `streams` entered, and so is `pre`: a
    pre-mix acts one sublayer late. `new` has the dtype of `streams` and x that of `out`; the sum that x is the norm
    of, and x, are rounded to the dtype of `streams`. Raises ValueError when the shapes do not fit each other.
    """
    _check(streams, fn, base, scale)
    t, c, d = streams.shape
    for name, array, shape in (("out", out, (t, d)), ("post", post, (t, c)), ("comb", comb, (t, c, c)),
                               ("pre", pre, (t, c)), ("norm_weight", norm_weight, (d,))):  # fmt: skip
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; streams of shape {streams.shape} need {shape}")
    function = advance
    if choose("mhc_advance", implementation) == "mosaic":
        from widemesh.pallas_kernels.mhc import mosaic

        function = mosaic.advance
    return function(
        out, streams, post, comb, pre, norm_weight, fn, base, scale, iterations=iterations, hc_eps=hc_eps,
        norm_eps=norm_eps,
    )  # fmt: skip


def _check(streams: Array, fn: Array, base: Array, scale: Array) -> None:
    _, c, d = streams.shape
    mixes = c * (c + 2)
    for name, array, shape in (("fn", fn, (mixes, c * d)), ("base", base, (mixes,)), ("scale", scale, (3,))):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; streams of shape {streams.shape} need {shape}")
