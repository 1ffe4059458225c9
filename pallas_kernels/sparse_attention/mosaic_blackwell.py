"""The Blackwell kernel of `attend_packed`: one warpgroup drives the tensor core, one fetches and dequantises.

The dataflow is Hopper's. A product of 64 heads uses half of the lanes of tensor memory, so that both halves of the
sum (128 columns each) and the scores (32) fit together. The weights go through shared memory. The product of a block
is awaited only when the next block needs the sum, so it runs beside that block's scores.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from widemesh.pallas_kernels.gpu import kernel_options
from widemesh.pallas_kernels.gpu.store import store
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

_TILE = tile_transforms(32)  # half the width of Hopper's: M = 64 asks for it


def attend_blackwell(
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
    """As `attend_hopper`."""
    rows, heads, dim = q.shape
    half, blocks = dim // 2, places.shape[1]

    def body(inputs: tuple[Any, ...], outputs: tuple[Any, ...], scratch: tuple[Any, ...]) -> None:
        q_hbm, window_hbm, pages_hbm, places_hbm, used_hbm, sink_hbm = inputs
        q_smem, keys, packed, scale_rows, place_smem, weights_smem, lower, upper, score_sum, *barriers = scratch
        q_ready, place_ready, loaded, full, free, scored, weighed = barriers
        sums = (lower, upper)
        row, tile, split = lax.axis_index("row"), lax.axis_index("tile"), lax.axis_index("split")
        group = lax.axis_index("group")
        begin, end = share_of(used_hbm[row], split, splits)
        own = pl.ds(tile * HEADS, HEADS)

        @pl.when(group == 1)
        def _produce() -> None:
            for part in range(2):
                plgpu.copy_gmem_to_smem(q_hbm.at[row, own, pl.ds(part * half, half)], q_smem.at[part], q_ready)
            plgpu.copy_gmem_to_smem(places_hbm.at[row], place_smem, place_ready)
            plgpu.barrier_wait(place_ready)
            produce(window_hbm, pages_hbm, place_smem, packed, scale_rows, keys, loaded, full, free,
                    begin=begin, end=end, window_blocks=window_blocks, source=source)  # fmt: skip

        @pl.when(group == 0)
        def _multiply() -> None:
            plgpu.barrier_wait(place_ready)
            plgpu.barrier_wait(q_ready)

            def step(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                top, total = carry
                slot = lax.rem(block - begin, SLOTS)
                plgpu.barrier_wait(full.at[slot])
                for part in range(2):
                    plgpu.tcgen05_mma(score_sum, q_smem.at[part], keys.at[slot, part].T, accumulate=part > 0)
                plgpu.tcgen05_commit_arrive(scored)
                plgpu.barrier_wait(scored)
                scores = plgpu.async_load_tmem(score_sum, layout=LAYOUT)
                plgpu.wait_load_tmem()
                weights, decay, top, total = weigh_block(scores, place_smem.at[block], top, total, dim)

                @pl.when(block > begin)
                def _() -> None:
                    plgpu.barrier_wait(weighed)
                    plgpu.barrier_arrive(free.at[1 - slot])
                    for part in range(2):
                        held = plgpu.async_load_tmem(sums[part], layout=LAYOUT)
                        plgpu.wait_load_tmem()
                        plgpu.async_store_tmem(sums[part], held * lax.broadcast_in_dim(decay, held.shape, [0]))

                weights_smem[...] = weights
                plgpu.commit_smem()
                plgpu.commit_tmem()
                for part in range(2):
                    plgpu.tcgen05_mma(sums[part], weights_smem, keys.at[slot, part], accumulate=block > begin)
                plgpu.tcgen05_commit_arrive(weighed)
                return top, total

            top, total = lax.fori_loop(begin, end, step, nothing_yet(HEADS))

            @pl.when(end > begin)
            def _() -> None:
                plgpu.barrier_wait(weighed)

            for part in range(2):
                place = outputs[0].at[split, row, own, pl.ds(part * half, half)]

                @pl.when(end > begin)
                def _(part: int = part, place: Any = place) -> None:
                    acc = plgpu.async_load_tmem(sums[part], layout=LAYOUT)
                    plgpu.wait_load_tmem()
                    if splits == 1:
                        acc = normalise(acc, top, total, sink_hbm.at[own])
                    store(place, acc.astype(outputs[0].dtype), optimized=False)

                @pl.when(end <= begin)
                def _(place: Any = place) -> None:
                    zeros = jnp.zeros((HEADS, half), outputs[0].dtype)
                    store(place, plgpu.layout_cast(zeros, LAYOUT), optimized=False)

            if splits > 1:
                for output, value in zip(outputs[1:], (top, total), strict=True):
                    store(output.at[split, row, own], value, optimized=False)

    def kernel(*refs: Any) -> None:
        body(refs[:6], refs[6 : 6 + len(results)], refs[6 + len(results) :])

    results = result_types(splits, rows, heads, dim, dtype)
    return plgpu.kernel(  # type: ignore[no-any-return]
        kernel,
        out_type=results,
        scratch_types=[
            plgpu.SMEM((2, HEADS, half), jnp.float16, transforms=_TILE),
            plgpu.SMEM((SLOTS, 2, BLOCK, half), jnp.float16, transforms=_TILE),
            plgpu.SMEM((BLOCK, packed_bytes(dim)), jnp.uint8),
            plgpu.SMEM((SCALES, BLOCK), jnp.float16),
            plgpu.SMEM((blocks, BLOCK), jnp.int32),
            plgpu.SMEM((HEADS, BLOCK), jnp.float16, transforms=_TILE),
            plgpu.TMEM((HEADS, half), jnp.float32),
            plgpu.TMEM((HEADS, half), jnp.float32),
            plgpu.TMEM((HEADS, BLOCK), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=BLOCK, orders_tensor_core=True),  # one arrival per copy, not 128
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        grid=(rows, heads // HEADS, splits),
        grid_names=("row", "tile", "split"),
        kernel_name="sparse_attention_blackwell",
        num_threads=2,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **kernel_options(),
    )(q, window_rows, pages, places, used, sink)
