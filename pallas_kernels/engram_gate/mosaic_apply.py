"""Gate and update of Engram in one pass (formula: `reference`). One kernel for Hopper and Blackwell, no tensor core.

    block = row of T         thread t holds values 128 * w * i + w * t .. + w - 1 of every piece i

    streams [C, D] ──┬── kept in SMEM as they are ─────────────────── + gate[c] * value ──> new streams [C, D]
    keys    [C, D] ──┴─ sum h*qk*key, sum h*h, sum key*key ─ SMEM ─ gate[c] ─┘     value [D] ┘

Streams, keys, value and result cross HBM once: (3 C + 1) * D values a row, 130 KiB in bfloat16 at C = 4, D = 5120,
which is the floor and what bounds it (about 15 FLOP per 6 bytes). The product of the two norm weights, 80 KiB, is
read again by every row from L2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from widemesh.pallas_kernels.engram_gate.reference import MIN_MATCH
from widemesh.pallas_kernels.gpu import kernel_options
from widemesh.pallas_kernels.gpu.store import store
from widemesh.pallas_kernels.thread_rows import (
    THREADS,
    load_rows,
    load_rows_f32,
    pieces,
    row_width,
    store_rows,
    sum_scratch,
    sum_threads,
    zero_sums,
)


def engram_apply(
    streams: Float[Array, "T C D"],
    key_value: Float[Array, "T (C+1)*D"],
    q_weight: Float[Array, "C D"],
    k_weight: Float[Array, "C D"],
    *,
    eps: float,
) -> Float[Array, "T C D"]:
    """See `op.engram_apply`. Raises ValueError for a D that is no multiple of 128."""
    t, c, d = streams.shape
    width = row_width(d, streams.dtype, name="hidden")
    if t == 0:
        return streams
    num_pieces = d // (128 * width)

    def engram_gate_apply(streams_ref, both_ref, qk_ref, out_ref, kept, parts, totals):  # type: ignore[no-untyped-def]
        row = lax.axis_index("row")

        def add(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            new = []
            for j in range(c):
                stored = load_rows(streams_ref.at[row, j, i], width)
                store(kept.at[j, i], stored, optimized=False)
                h, key = stored.astype(jnp.float32), load_rows_f32(both_ref.at[row, j, i], width)
                match = h * load_rows(qk_ref.at[j, i], width) * key
                new += [jnp.sum(match, axis=1), jnp.sum(h * h, axis=1), jnp.sum(key * key, axis=1)]
            return tuple(total + more for total, more in zip(sums, new, strict=True))

        sums = lax.fori_loop(0, num_pieces, add, tuple(zero_sums(width) for _ in range(3 * c)))
        sum_threads(sums, parts, totals)
        gates = [_gate(totals[3 * j], totals[3 * j + 1], totals[3 * j + 2], d, eps) for j in range(c)]

        def update(i: Array, _: None) -> None:
            value = load_rows_f32(both_ref.at[row, c, i], width)
            for j in range(c):  # a thread reads what it stored itself
                store_rows(out_ref.at[row, j, i], load_rows_f32(kept.at[j, i], width) + gates[j] * value)

        lax.fori_loop(0, num_pieces, update, None)

    kernel = plgpu.kernel(
        engram_gate_apply,
        out_type=jax.ShapeDtypeStruct((t, c, num_pieces, THREADS, width), streams.dtype),
        scratch_types={"kept": plgpu.SMEM((c, num_pieces, THREADS, width), streams.dtype), **sum_scratch(3 * c)},
        grid=(t,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **kernel_options(),
    )
    qk = pieces(q_weight.astype(jnp.float32) * k_weight.astype(jnp.float32), width)
    both = pieces(key_value.reshape(t, c + 1, d), width)
    return kernel(pieces(streams, width), both, qk).reshape(t, c, d)


def _gate(match: Array, square: Array, key_square: Array, d: int, eps: float) -> Array:
    """The gate of a stream from its three sums (scalars)."""
    match = match * lax.rsqrt(square * (1.0 / d) + eps) * lax.rsqrt(key_square * (1.0 / d) + eps) * d**-0.5
    root = jnp.sqrt(jnp.maximum(jnp.abs(match), MIN_MATCH))
    is_negative = (match < 0) | (1.0 / match < 0)  # -0 counts as negative, as with copysign
    return 1.0 / (1.0 + jnp.exp(jnp.where(is_negative, root, -root)))
