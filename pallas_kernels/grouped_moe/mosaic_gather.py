"""Copies the rows of the used blocks into their places. One kernel for all architectures: it multiplies nothing.

    x [parts, T, D/parts] --row `rows[p]`, by the copy engine through shared memory--> out [parts, places, D/parts], p

Eight rows at a time in each CTA: 80 KiB in flight at D = 5120, twice what its share of the bandwidth needs. Places of
unused blocks do not move: an XLA gather would write 8 times as many where 7 of 8 pairs belong to other ranks.
Floor: each used place read and written once, 2 * 2 * D bytes; bound by bytes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from widemesh.pallas_kernels.gpu import kernel_options
from widemesh.pallas_kernels.grouped_moe.grouping import Grouping

_AT_ONCE = 8  # divides the rows of a block
_SEGMENT = 128  # values; a copy takes at most 256 along one axis


def gather_rows(
    x: BFloat16[Array, "parts T W"], grouping: Grouping, *, block_rows: int, ctas: int
) -> BFloat16[Array, "parts places W"]:
    """Row `grouping.rows[p]` at every place p of a used block; other places are not written. W a multiple of 128."""
    parts, t, width = x.shape
    (places,) = grouping.rows.shape
    segments = (width // _SEGMENT, _SEGMENT)

    def body(rows: Any, used: Any, source: Any, out: Any, buffer: Any, arrived: Any) -> None:
        cta = lax.axis_index("cta")
        batches = used[0] * (block_rows // _AT_ONCE)
        mine = lax.div(batches - cta + ctas - 1, jnp.int32(ctas))

        def batch(i: Array, _: None) -> None:
            first = (cta + i * ctas) * _AT_ONCE
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for j in range(_AT_ONCE):
                plgpu.copy_gmem_to_smem(source.at[:, rows[first + j]], buffer.at[j], arrived)
            plgpu.barrier_wait(arrived)
            for j in range(_AT_ONCE):
                plgpu.copy_smem_to_gmem(buffer.at[j], out.at[:, first + j])

        lax.fori_loop(0, mine, batch, None)
        plgpu.wait_smem_to_gmem(0)

    gathered = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((parts, places, *segments), x.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types={
            "buffer": plgpu.SMEM((_AT_ONCE, parts, *segments), x.dtype),
            "arrived": plgpu.Barrier(num_arrivals=_AT_ONCE),
        },
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="grouped_moe_gather",
        **kernel_options(),
    )(grouping.rows, grouping.used, x.reshape(parts, t, *segments))
    return gathered.reshape(parts, places, width)  # type: ignore[no-any-return]
