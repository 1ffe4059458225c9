"""State that requests keep between steps: pages of compressed KV, and rings per slot.

B slots. Pages grow with the context and are named by a table per slot; everything else is a ring per slot whose row
is position mod ring length, so there is nothing to allocate, and going back by up to `max_drafts` tokens is nothing
but the next step starting at an earlier position. All bytes lie as `pallas_kernels.layout` says. Functions return new
arrays; with donated inputs XLA updates them in place.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

from widemesh.model.config import ModelConfig
from widemesh.model.numerics import Numerics
from widemesh.pallas_kernels.compress.ring import read_ring, write_ring
from widemesh.pallas_kernels.layout import PageLayout, VectorLayout
from widemesh.pallas_kernels.paged_cache import decode_vectors, encode_vectors

RING_MULTIPLE = 32
DEFAULT_PAGE_SIZE = 64  # tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Rings of one layer. `open_group` has no elements in layers without a compressor."""

    window: UInt8[Array, "B ring row_bytes"]
    open_group: tuple[Float[Array, "B open 2 H"], ...]  # () or one: values and gates of the newest tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """All state of one rank."""

    pages: UInt8[Array, "pages page_bytes"]  # page 0 is nobody's
    table: Int32[Array, "B P"]  # page ids by place in the sequence; 0 where there is none
    layers: tuple[LayerCache, ...]
    layout: PageLayout = dataclasses.field(metadata={"static": True})


def page_layout(config: ModelConfig, numerics: Numerics, page_size: int) -> PageLayout:
    """Pages of a model under a numerics setting: packed records where it quantises caches, f32 otherwise."""
    return PageLayout.build(
        page_size=page_size,
        ratios=[config.roles[layer].ratio for layer in config.kv_source_layers],
        head_dim=config.head_dim,
        index_dim=config.index_head_dim,
        record="packed" if numerics.cache_quant else "f32",
    )


def ring_rows(config: ModelConfig, max_drafts: int = 0) -> int:
    """Rows of a window ring: the window, the row being written and the drafts after it, rounded up."""
    return -(-(config.sliding_window + 1 + max_drafts) // RING_MULTIPLE) * RING_MULTIPLE


def init_cache(
    config: ModelConfig, layout: PageLayout, *, slots: int, pages: int, table_pages: int, max_drafts: int | None = None
) -> Cache:
    """Zeroed state of `slots` slots with tables of `table_pages` pages out of a pool of `pages`, page 0 included.

    The draft's layers come after the backbone's. `max_drafts`: `config.num_speculative_tokens` if None.
    """
    layers, max_drafts = [], config.num_speculative_tokens if max_drafts is None else max_drafts
    for role in (*config.roles, *config.draft_roles):
        window = jnp.zeros((slots, ring_rows(config, max_drafts), layout.window.num_bytes), jnp.uint8)
        # One token is always accepted, so a step starts at most max_drafts before the newest row written.
        open_rows = role.ratio - 1 + max_drafts if role.ratio > 1 else 0
        open_group = (jnp.zeros((slots, open_rows, 2, config.head_dim)),) if role.owns_kv else ()
        layers.append(LayerCache(window, open_group))
    return Cache(
        pages=jnp.zeros((pages, layout.page_bytes), jnp.uint8),
        table=jnp.zeros((slots, table_pages), jnp.int32),
        layers=tuple(layers),
        layout=layout,
    )


def private_pages(cache: Cache) -> Cache:
    """The same cache with pages 1 and on dealt out to the slots in turn, as many as their tables hold."""
    slots, per_slot = cache.table.shape
    return dataclasses.replace(
        cache, table=1 + jnp.arange(slots * per_slot, dtype=jnp.int32).reshape(slots, per_slot)
    )


def window_before(
    ring: UInt8[Array, "B ring row_bytes"],
    start: Int32[Array, "B"],
    first: Int32[Array, "B"],
    window: int,
    layout: VectorLayout,
) -> Float[Array, "B W1 H"]:
    """The window - 1 rows before `start` in order of position; those before position `first` are zero."""
    position = start[:, None] - (window - 1) + jnp.arange(window - 1)
    rows = read_ring(ring, position)
    return jnp.where((position >= first[:, None])[..., None], decode_vectors(rows, layout), 0.0)


def write_window(
    ring: UInt8[Array, "B ring row_bytes"],
    kv: Float[Array, "B S H"],
    start: Int32[Array, "B"],
    length: Int32[Array, "B"],
    layout: VectorLayout,
) -> UInt8[Array, "B ring row_bytes"]:
    """Encode and write the newest min(length, ring) valid rows; older ones would be overwritten in the same step."""
    return write_ring(ring, encode_vectors(kv, layout), start, length)


def written_entries(
    rows: Float[Array, "B L H"], tokens: Int32[Array, "B"], ratio: int
) -> Float[Array, "B L H"]:
    """The entries of the first `tokens` tokens, and zeros for what an earlier owner of a page has left behind them.

    Attention gives unseen entries weight 0, which a NaN would survive.
    """
    written = jnp.arange(rows.shape[1]) < (tokens // ratio)[:, None]
    return jnp.where(written[..., None], rows, 0.0)
