"""State that a request keeps between steps: window rows, compressed entries, index keys, the open compressor group.

B slots. Arrays are f32 here and already hold values on the cache grid, so a packed form is value-identical.
Functions return new arrays; with donated inputs XLA updates them in place.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from widemesh.model.config import ModelConfig

RING_MULTIPLE = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SourceCache:
    """Growing state of a layer that owns compressed KV. Entry j covers tokens j * ratio .. j * ratio + ratio - 1."""

    entries: Float[Array, "B L H"]  # rotated, quantised
    index_keys: Float[Array, "B L J"]
    pending: Float[Array, "B open 2 H"]  # values and gates of the last ratio - 1 tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """State of one layer. `source` has no elements in layers that own no compressed KV."""

    window: Float[Array, "B ring H"]  # row = position mod ring
    source: tuple[SourceCache, ...]  # () or one element: structure, not data


Cache = tuple[LayerCache, ...]


def ring_rows(config: ModelConfig) -> int:
    """Rows of a window ring: the window and the row being written, rounded up."""
    return -(-(config.sliding_window + 1) // RING_MULTIPLE) * RING_MULTIPLE


def init_cache(config: ModelConfig, slots: int, max_len: int) -> Cache:
    """Zeroed state for `slots` requests of up to `max_len` tokens."""
    layers = []
    for role in config.roles:
        window = jnp.zeros((slots, ring_rows(config), config.head_dim))
        source: tuple[SourceCache, ...] = ()
        if role.owns_kv:
            entries = max_len // role.ratio
            source = (
                SourceCache(
                    jnp.zeros((slots, entries, config.head_dim)),
                    jnp.zeros((slots, entries, config.index_head_dim)),
                    jnp.zeros((slots, role.ratio - 1, 2, config.head_dim)),
                ),
            )
        layers.append(LayerCache(window, source))
    return tuple(layers)


def window_before(ring: Float[Array, "B ring H"], start: Int32[Array, "B"], window: int) -> Float[Array, "B W1 H"]:
    """The window - 1 rows before `start` in order of position; rows before position 0 are zero."""
    position = start[:, None] - (window - 1) + jnp.arange(window - 1)
    rows = jnp.take_along_axis(ring, (position % ring.shape[1])[..., None], axis=1)
    return jnp.where((position >= 0)[..., None], rows, 0.0)


def written_entries(
    store: Float[Array, "B L H"], tokens: Int32[Array, "B"], ratio: int
) -> Float[Array, "B L H"]:
    """The entries of the first `tokens` tokens, and zeros for what an earlier owner of the slot has left behind them.

    Attention gives unseen entries weight 0, which a NaN would survive.
    """
    written = jnp.arange(store.shape[1]) < (tokens // ratio)[:, None]
    return jnp.where(written[..., None], store, 0.0)


def write_window(
    ring: Float[Array, "B ring H"], kv: Float[Array, "B S H"], start: Int32[Array, "B"], length: Int32[Array, "B"]
) -> Float[Array, "B ring H"]:
    """Write the newest min(length, ring) valid rows; older ones would be overwritten within the same step."""
    rows = kv.shape[1]
    capacity = ring.shape[1]
    row = jnp.arange(rows)
    kept = (row < length[:, None]) & (row >= length[:, None] - capacity)
    place = jnp.where(kept, (start[:, None] + row) % capacity, capacity)  # capacity = out of range = dropped
    return ring.at[jnp.arange(ring.shape[0])[:, None], place].set(kv, mode="drop")


def write_entries(
    store: Float[Array, "B L H"], new: Float[Array, "B M H"], index: Int32[Array, "B M"], valid: Bool[Array, "B M"]
) -> Float[Array, "B L H"]:
    """Write compressed rows at their entry index; invalid ones are dropped."""
    place = jnp.where(valid, index, store.shape[1])
    return store.at[jnp.arange(store.shape[0])[:, None], place].set(new, mode="drop")
