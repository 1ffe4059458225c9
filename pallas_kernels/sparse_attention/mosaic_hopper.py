"""The Hopper kernel of `attend_packed`: two warpgroups multiply, one fetches and dequantises.

Both multiplying warpgroups compute all scores of a block (the operands are in shared memory, and the weights then are
in registers where the second product wants them) and sum one half of the head dim each: 128 registers a thread.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from widemesh.pallas_kernels.gpu import is_interpreted, kernel_options, swap
from widemesh.pallas_kernels.gpu.store import store
from widemesh.pallas_kernels.gpu.wgmma import wgmma
from widemesh.pallas_kernels.layout import SourceLayout
from widemesh.pallas_kernels.sparse_attention.dequantise import SCALES
from widemesh.pallas_kernels.sparse_attention.parts import result_types
from widemesh.pallas_kernels.sparse_attention.places import BLOCK
from widemesh.pallas_kernels.sparse_attention.producer import (
    HEADS,
    SLOTS,
    packed_bytes,
    produce,
    share_of,
    tile_transforms,
)
from widemesh.pallas_kernels.sparse_attention.softmax import LAYOUT, normalise, nothing_yet, weigh_block

swap(
    kernel="sparse_attention.attend_packed (Hopper)",
    missing="wgmma with A in registers, into an accumulator that a loop carries",
    staged="the weights written to shared memory first, the product added after it",
)

_TILE = tile_transforms(64)


def attend_hopper(
    q: jax.Array,
    window_rows: jax.Array,
    pages: jax.Array,
    places: jax.Array,
    used: jax.Array,
    sink: jax.Array,
    *,
    source: SourceLayout | None,
    window_blocks: int,
    splits: int,
    dtype: Any,
) -> tuple[jax.Array, ...]:
    """The attention in `dtype`, or its parts with several splits: see `result_types`.

    q f16 [R, N, H]; window_rows u8 [B * M, bytes]; places and used as `key_places` makes them; sink f32 [N] times
    log2(e).
    """
    rows, heads, dim = q.shape
    half, blocks = dim // 2, places.shape[1]

    def body(inputs: tuple[Any, ...], outputs: tuple[Any, ...], scratch: tuple[Any, ...]) -> None:
        q_hbm, window_hbm, pages_hbm, places_hbm, used_hbm, sink_hbm = inputs
        q_smem, keys, packed, scale_rows, place_smem, staged, q_ready, place_ready, loaded, full, free = scratch
        row, tile, split = lax.axis_index("row"), lax.axis_index("tile"), lax.axis_index("split")
        group = lax.axis_index("group")
        begin, end = share_of(used_hbm[row], split, splits)
        own = pl.ds(tile * HEADS, HEADS)

        @pl.when(group == 2)
        def _produce() -> None:
            plgpu.set_max_registers(80, action="decrease")
            for part in range(2):
                plgpu.copy_gmem_to_smem(q_hbm.at[row, own, pl.ds(part * half, half)], q_smem.at[part], q_ready)
            plgpu.copy_gmem_to_smem(places_hbm.at[row], place_smem, place_ready)
            plgpu.barrier_wait(place_ready)
            produce(window_hbm, pages_hbm, place_smem, packed, scale_rows, keys, loaded, full, free,
                    begin=begin, end=end, window_blocks=window_blocks, source=source)  # fmt: skip

        @pl.when(group < 2)
        def _multiply() -> None:
            plgpu.set_max_registers(208, action="increase")
            plgpu.barrier_wait(place_ready)
            plgpu.barrier_wait(q_ready)

            def step(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                acc, top, total = carry
                slot = lax.rem(block - begin, SLOTS)
                plgpu.barrier_wait(full.at[slot])

                def product(ref: Any) -> jax.Array:
                    # Which half comes first changes with the slot, so that the descriptors of q are computed in the
                    # loop. Those of a fixed order do not depend on it: 32 of them, 64 registers, would be kept across
                    # it, which spills 228 bytes under jax 0.11.
                    for part in (slot, 1 - slot):
                        wgmma(ref, q_smem.at[part], keys.at[slot, part].T)
                    return ref[...]

                scores = pl.run_scoped(product, plgpu.ACC((HEADS, BLOCK), jnp.float32))
                weights, decay, top, total = weigh_block(scores, place_smem.at[block], top, total, dim)
                acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
                acc = _add_product(acc, weights, keys.at[slot, group], staged, group)
                plgpu.barrier_arrive(free.at[slot])
                return acc, top, total

            start = plgpu.layout_cast(jnp.zeros((HEADS, half), jnp.float32), LAYOUT)
            acc, top, total = lax.fori_loop(begin, end, step, (start, *nothing_yet(HEADS)))
            place = outputs[0].at[split, row, own, pl.ds(group * half, half)]
            if splits == 1:
                acc = normalise(acc, top, total, sink_hbm.at[own])
            store(place, acc.astype(outputs[0].dtype), optimized=False)
            if splits > 1:

                @pl.when(group == 0)
                def _() -> None:
                    for output, value in zip(outputs[1:], (top, total), strict=True):
                        store(output.at[split, row, own], value, optimized=False)

    def kernel(*refs: Any) -> None:
        body(refs[:6], refs[6 : 6 + len(results)], refs[6 + len(results) :])

    results = result_types(splits, rows, heads, dim, dtype)
    staged = plgpu.SMEM((2, HEADS, BLOCK), jnp.float16, transforms=_TILE) if is_interpreted() else None
    return plgpu.kernel(  # type: ignore[no-any-return]
        kernel,
        out_type=results,
        scratch_types=[
            plgpu.SMEM((2, HEADS, half), jnp.float16, transforms=_TILE),
            plgpu.SMEM((SLOTS, 2, BLOCK, half), jnp.float16, transforms=_TILE),
            plgpu.SMEM((BLOCK, packed_bytes(dim)), jnp.uint8),
            plgpu.SMEM((SCALES, BLOCK), jnp.float16),
            plgpu.SMEM((blocks, BLOCK), jnp.int32),
            staged,
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=BLOCK),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        ],
        grid=(rows, heads // HEADS, splits),
        grid_names=("row", "tile", "split"),
        kernel_name="sparse_attention_hopper",
        num_threads=3,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **kernel_options(),
    )(q, window_rows, pages, places, used, sink)


def _add_product(acc: jax.Array, weights: jax.Array, keys: Any, staged: Any, group: jax.Array) -> jax.Array:
    """acc [HEADS, H / 2] + weights [HEADS, BLOCK] keys [BLOCK, H / 2]."""
    if not is_interpreted():

        def add(ref: Any) -> None:
            wgmma(ref, weights, keys)

        return pl.run_state(add)(plgpu.ACC.init(acc))  # type: ignore[no-any-return]

    staged[group] = weights
    plgpu.commit_smem()

    def product(ref: Any) -> jax.Array:
        wgmma(ref, staged.at[group], keys)
        return ref[...]  # type: ignore[no-any-return]

    return acc + pl.run_scoped(product, plgpu.ACC((HEADS, acc.shape[1]), jnp.float32))
