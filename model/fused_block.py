"""A layer under packed numerics: between sublayers the streams are read and written once.

A sublayer's output is not mixed into the streams where it is made but where the next site reads them: `mhc_advance`
expands, collapses, norms and computes the next site's coefficients in one pass, across layers too. So what one layer
hands to the next is the streams that its last sublayer entered and a `Pending` output. Formula: docs/model.md,
"Single-pass mHC".
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax
from jaxtyping import Array, Float

from widemesh.model import packed_ops
from widemesh.model.cache import LayerCache
from widemesh.model.params import value
from widemesh.model.shared import Shared
from widemesh.model.step import StepContext
from widemesh.pallas_kernels import mhc

if TYPE_CHECKING:
    from widemesh.model.block import Block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """What the next site mixes into the streams. `pre` is the mix of its collapse, as between settled layers."""

    out: Float[Array, "B S D"]
    pre: Float[Array, "B S C"]
    post: Float[Array, "B S C"]
    comb: Float[Array, "B S C C"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entered:
    """A sublayer's site: the streams that enter it, their collapsed and normed sum, and the site's coefficients."""

    streams: Float[Array, "B S C D"]
    x: Float[Array, "B S D"]
    pre: Float[Array, "B S C"]
    post: Float[Array, "B S C"]
    comb: Float[Array, "B S C C"]

    def pending(self, out: Float[Array, "B S D"]) -> Pending:
        """With the sublayer's output."""
        return Pending(out=out, pre=self.pre, post=self.post, comb=self.comb)


def run(
    block: Block, streams: Float[Array, "B S C D"], pre: Float[Array, "B S C"] | Pending, cache: LayerCache,
    shared: Shared, step: StepContext,
) -> tuple[Float[Array, "B S C D"], Pending, LayerCache, Shared]:  # fmt: skip
    """The whole layer."""
    if block.role.has_engram:  # it changes the streams between two sublayers
        streams, pre = settle(streams, pre, step)
        streams = block.engram(streams, step.at("engram"))
    if isinstance(pre, Pending):
        entered = advance(block, "attn", streams, pre, step)
    else:
        entered = enter(block, streams, pre, step)
    if block.role.feeds_draft:
        shared = shared.feed(entered.streams, step)
    step.record("attn.input", entered.x)
    near, cache, shared = block.attn.write(entered.x, cache, shared, step.at("attn"))
    streams, pending, shared = _sublayers(block, entered, near, shared, step)
    return streams, pending, cache, shared


def finish(
    block: Block, streams: Float[Array, "B S C D"], pre: Float[Array, "B S C"], near: Any, shared: Shared,
    step: StepContext,
) -> tuple[Float[Array, "B S C D"], Pending, Shared]:  # fmt: skip
    """The layer from its attention on, for settled streams."""
    return _sublayers(block, enter(block, streams, pre, step), near, shared, step)


def settle(
    streams: Float[Array, "B S C D"], pre: Float[Array, "B S C"] | Pending, step: StepContext
) -> tuple[Float[Array, "B S C D"], Float[Array, "B S C"]]:
    """Streams with nothing left to mix in, and the pre-mix of the next collapse."""
    if not isinstance(pre, Pending):
        return streams, pre
    return step.numerics.store(mhc.expand(pre.out, streams, pre.post, pre.comb)), pre.pre


def enter(
    block: Block, streams: Float[Array, "B S C D"], pre: Float[Array, "B S C"], step: StepContext
) -> Entered:
    """The attention site of settled streams."""
    site = packed_ops.mhc_site(_rows(streams), *_site(block, "attn"), **_settings(block, step))
    own_pre, post, comb = (part.reshape(*streams.shape[:2], *part.shape[1:]) for part in site)
    x = block.attention_input(streams, pre, step)
    return Entered(streams=streams, x=x, pre=own_pre, post=post, comb=comb)


def advance(
    block: Block, which: Literal["attn", "ffn"], streams: Float[Array, "B S C D"], pending: Pending, step: StepContext
) -> Entered:
    """The next site: what is pending goes into the streams on the way."""
    norm = block.attn_norm if which == "attn" else block.ffn_norm
    mixed, x, site = packed_ops.mhc_advance(
        _rows(pending.out), _rows(streams), _rows(pending.post), _rows(pending.comb), _rows(pending.pre),
        value(norm.weight), *_site(block, which), **_settings(block, step),
    )  # fmt: skip
    lead = streams.shape[:2]
    pre, post, comb = (part.reshape(*lead, *part.shape[1:]) for part in site)
    return Entered(streams=mixed.reshape(streams.shape), x=x.reshape(*lead, -1), pre=pre, post=post, comb=comb)


def _sublayers(
    block: Block, entered: Entered, near: Any, shared: Shared, step: StepContext
) -> tuple[Float[Array, "B S C D"], Pending, Shared]:
    out, shared = block.attn.attend(entered.x, near, shared, step.at("attn"))
    entered = advance(block, "ffn", entered.streams, entered.pending(out), step)
    out = block.ffn(entered.x, step.at("ffn"))
    return entered.streams, entered.pending(out), shared


def _site(block: Block, which: Literal["attn", "ffn"]) -> tuple[Array, Array, Array]:
    fn, base, scale = (value(getattr(block, f"hc_{which}_{part}")) for part in ("fn", "base", "scale"))
    return fn, base, scale


def _settings(block: Block, step: StepContext) -> dict[str, Any]:
    config = block.config
    return {
        "iterations": config.hc_sinkhorn_iters,
        "hc_eps": config.hc_eps,
        "norm_eps": config.rms_norm_eps,
        "implementation": step.settings.kernels,
    }


def _rows(x: Float[Array, "B S ..."]) -> Float[Array, "T ..."]:
    return x.reshape(-1, *x.shape[2:])
