"""Keys of the draft's rows: all rows of a pass see each other and the window before the first (see `keys.WindowKeys`).

Since they see the same keys, they are handed to attention as one row with all their heads, which stands at the position
of the last and whose window is longer by their number. B requests, S rows, N heads, H head dim, W window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from widemesh.model import cache, packed_ops
from widemesh.model.packed_keys import NearRows
from widemesh.model.params import value
from widemesh.model.shared import Shared
from widemesh.model.step import StepContext
from widemesh.pallas_kernels.compress.ring import write_ring
from widemesh.pallas_kernels.paged_cache import encode_vectors, fake_quant
from widemesh.pallas_kernels.sparse_attention import SelectedIndices, sparse_attention

if TYPE_CHECKING:
    from widemesh.model.attention import Attention


def write_window(
    attention: Attention, kv: Float[Array, "B S H"], ring: UInt8[Array, "B ring row_bytes"], shared: Shared,
    step: StepContext,
) -> tuple[Any, UInt8[Array, "B ring row_bytes"]]:  # fmt: skip
    """The W rows before the pass, and its own.

    Packed ones are read where they lie, so those of the pass lie there too until the context of their positions is
    written over them; no position before it is lost, since a ring has room for W + S rows.
    """
    rows, layout, window = step.rows, shared.layout.window, attention.config.sliding_window
    if step.numerics.packed_weights:
        written = write_ring(ring, encode_vectors(kv.astype(jnp.float32), layout), rows.start, rows.length)
        return NearRows(written, jnp.zeros_like(rows.start)), written
    before = cache.window_before(ring, rows.start, rows.first, window + 1, layout)
    return jnp.concatenate([before, fake_quant(kv, layout)], axis=1), ring


def attend(
    attention: Attention, q: Float[Array, "B S N H"], near: Any, shared: Shared, step: StepContext
) -> Float[Array, "B S N H"]:
    """Attention of every row over all of them and the window before."""
    b, s, n, h = q.shape
    q, sink = q.reshape(b, 1, s * n, h), jnp.tile(value(attention.attn_sink), s)
    last, first, window = step.rows.start + s - 1, step.rows.first, attention.config.sliding_window + s
    none = jnp.zeros((b, 1, 0), jnp.int32)
    if isinstance(near, NearRows):
        out = packed_ops.attend_packed(
            q, near.rows, near.origin, last, first, shared.pages, shared.table, none, sink, source=None,
            window_layout=shared.layout.window, window=window, implementation=step.settings.kernels,
        )  # fmt: skip
    else:
        out = sparse_attention(
            q, near, last, first, jnp.zeros((b, 1, 0, h)), SelectedIndices(none), sink, window=window, ratio=0,
            start_bound=step.settings.start_bound + s - 1, bf16_rounding=step.numerics.bf16_rounding,
        )  # fmt: skip
    return out.reshape(b, s, n, h)
