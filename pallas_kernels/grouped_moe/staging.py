"""What the products of both architectures share: views of the matrices, the order of work, the copies into stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from widemesh.pallas_kernels.gpu import kernel_options
from widemesh.pallas_kernels.grouped_moe.expert import ExpertMath
from widemesh.pallas_kernels.grouped_moe.grouping import Grouping
from widemesh.pallas_kernels.grouped_moe.packed import PackedMatrix
from widemesh.pallas_kernels.grouped_moe.tiles import FEATURES, GROUP, Tile

SIDE = FEATURES // 2  # features of a tile that one of the two computing warpgroups decodes


class Staging:
    """One call of a product: `rows` [parts, places, K / parts] times one matrix (down) or two (gate and up).

    A tile is 128 features in two sides of 64: by parity (even ones, odd ones) or in order. With two parts the rows'
    even and odd columns lie apart.
    """

    def __init__(
        self,
        rows: Array,
        matrices: tuple[PackedMatrix, ...],
        grouping: Grouping,
        tile: Tile,
        math: ExpertMath,
        *,
        ctas: int,
        by_parity: bool,
    ):
        self.math, self.tile, self.ctas, self.by_parity = math, tile, ctas, by_parity
        self.mats = len(matrices)
        self.is_into = self.mats == 2
        self.held, self.features, self.columns = matrices[0].shape
        self.parts, self.places, _ = rows.shape
        self.tiles = self.features // FEATURES
        self.steps = self.columns // tile.step
        self.groups = self.columns // GROUP  # scale bytes of a row
        # A copied row must be a multiple of 16 bytes and at most 256: the scales of one row, or of an even and an odd.
        self.split_scales = self.groups % 16 == 0
        assert by_parity or self.split_scales, "the caller checked the widths"
        self.out_dtype = jnp.bfloat16 if self.is_into or math.bf16_rounding else jnp.float32
        lead = (self.held * self.features // 2, 2) if by_parity else (self.held * self.features,)
        scale_shape = (*lead, self.groups) if self.split_scales else (lead[0], 2 * self.groups)
        self.arguments = (
            grouping.block_expert,
            grouping.used,
            grouping.weights,
            rows,
            [matrix.codes.reshape(*lead, self.columns // 2) for matrix in matrices],
            [matrix.scales.reshape(scale_shape) for matrix in matrices],
        )

    def launch(self, body: Any, out_shape: tuple[int, ...], *, warpgroups: int, scratch: dict[str, Any]) -> Array:
        """Runs `body(cta, mine, warpgroup, arguments, out, memory)` on a persistent grid."""

        def kernel(*refs: Any, **memory: Any) -> None:
            *arguments, out = refs
            cta = lax.axis_index("cta")
            used = arguments[1]
            mine = lax.div(used[0] * self.tiles - cta + self.ctas - 1, jnp.int32(self.ctas))
            body(cta, mine, lax.axis_index("wg"), arguments, out, memory)

        call = plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct(out_shape, self.out_dtype),
            grid=(self.ctas,),
            grid_names=("cta",),
            num_threads=warpgroups,
            thread_name="wg",
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
            kernel_name="grouped_moe_into" if self.is_into else "grouped_moe_out",
            **kernel_options(),
        )
        return call(*self.arguments)  # type: ignore[no-any-return]

    def scratch(self) -> dict[str, Any]:
        """Stages of rows and codes, tiles of scales, and their barriers."""
        tile, mats, buffers = self.tile, self.mats, self.tile.scale_buffers
        scale_shape = (2, SIDE, self.groups) if self.split_scales else (SIDE, 2 * self.groups)
        width = tile.step // self.parts
        return {
            "row_stages": plgpu.SMEM(
                (tile.stages, self.parts, tile.rows, width), jnp.bfloat16, transforms=tiled(2 * width, 2)
            ),
            "code_stages": plgpu.SMEM(
                (tile.stages, mats, 2, SIDE, tile.step // 2), jnp.uint8, transforms=tiled(tile.step // 2, 1)
            ),
            "scale_tiles": plgpu.SMEM((buffers, mats, *scale_shape), jnp.uint8),
            "full": plgpu.Barrier(num_arrivals=1 + 2 * mats, num_barriers=tile.stages),
            "scales_full": plgpu.Barrier(num_arrivals=mats * (1 + self.split_scales), num_barriers=buffers),
            "scales_free": plgpu.Barrier(num_arrivals=2, num_barriers=buffers),
        }

    def work(self, cta: Array, i: Array) -> tuple[Array, Array]:
        """Block and tile of a CTA's i-th piece of work.

        Neighbours share a block: a crowded expert's matrices are read from HBM once, and by its further blocks from
        the second-level cache.
        """
        index = cta + i * self.ctas
        return lax.div(index, jnp.int32(self.tiles)), lax.rem(index, jnp.int32(self.tiles))

    def copy_tile(self, i: Array, block: Array, tile: Array, arguments: Any, memory: Any) -> None:
        """Copies of one tile: its scales, then `steps` stages of rows and codes. Waits for what it overwrites."""
        block_expert, _, _, rows, codes, scales = arguments
        expert, cut = block_expert[block], self.tile
        buffer = lax.rem(i, jnp.int32(cut.scale_buffers))

        @pl.when(i >= cut.scale_buffers)
        def _reuse() -> None:
            plgpu.barrier_wait(memory["scales_free"].at[buffer])

        arrived = memory["scales_full"].at[buffer]
        for m in range(self.mats):
            target = memory["scale_tiles"].at[buffer, m]
            if self.split_scales:
                for side in range(2):
                    source = scales[m].at[*self._features(expert, tile, side)]
                    plgpu.copy_gmem_to_smem(source, target.at[side], arrived)
            else:
                features, _ = self._features(expert, tile, 0)
                plgpu.copy_gmem_to_smem(scales[m].at[features], target, arrived)

        def stage(k: Array, _: None) -> None:
            count = i * self.steps + k
            slot = lax.rem(count, jnp.int32(cut.stages))

            @pl.when(count >= cut.stages)
            def _reuse() -> None:
                plgpu.barrier_wait(memory["free"].at[slot])

            arrived, width = memory["full"].at[slot], cut.step // self.parts
            source = rows.at[:, pl.ds(block * cut.rows, cut.rows), pl.ds(k * width, width)]
            plgpu.copy_gmem_to_smem(source, memory["row_stages"].at[slot], arrived)
            half = cut.step // 2
            for m in range(self.mats):
                for side in range(2):
                    source = codes[m].at[*self._features(expert, tile, side), pl.ds(k * half, half)]
                    plgpu.copy_gmem_to_smem(source, memory["code_stages"].at[slot, m, side], arrived)

        lax.fori_loop(0, self.steps, stage, None)

    def _features(self, expert: Array, tile: Array, side: int) -> tuple[Any, ...]:
        """Index of one side's features in a matrix's leading axes."""
        if self.by_parity:
            return pl.ds(expert * (self.features // 2) + tile * SIDE, SIDE), side
        return (pl.ds(expert * self.features + tile * FEATURES + side * SIDE, SIDE),)

    def scales_of(self, m: int, side: Array, k: Array, buffer: Array, memory: Any) -> list[Array]:
        """Scale bytes of one side's 64 features for the groups of stage k, one array per group."""
        tiles, per_stage = memory["scale_tiles"].at[buffer, m], self.tile.step // GROUP
        loaded = []
        for group in range(per_stage):
            column = k * per_stage + group
            source = tiles.at[side, :, column] if self.split_scales else tiles.at[:, side * self.groups + column]
            loaded.append(plgpu.load(source, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False))
        return loaded

    def hidden(self, sums: tuple[Array, ...], weight: Array, layout: plgpu.Layout) -> Array:
        """weight * activate(gate, up), rounded: `ExpertMath.run` up to the activation rounding, features by rows."""
        gate, up = (self.round(total) for total in sums)
        gate = jnp.minimum(gate, self.math.limit)
        up = jnp.minimum(jnp.maximum(up, -self.math.limit), self.math.limit)
        weight = plgpu.layout_cast(lax.broadcast_in_dim(weight, gate.shape, [1]), layout)
        return self.round(gate / (1.0 + jnp.exp(-gate)) * up * weight)

    def round(self, x: Array) -> Array:
        """bfloat16 rounding, if on. Converts: in a kernel nothing drops such a pair."""
        return x.astype(jnp.bfloat16).astype(jnp.float32) if self.math.bf16_rounding else x


def tiled(row_bytes: int, itemsize: int) -> tuple[Any, ...]:
    """Transforms of shared memory whose rows are read as matrices: swizzled tiles of 8 rows."""
    swizzle = min(128, row_bytes)
    # mypy takes both for abstract: their base class declares a method without a body.
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
