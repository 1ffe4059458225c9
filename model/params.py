"""Parameters: described once, in the module that uses them, by shape, logical axes and stored form.

A module holds abstract parameters; loading, sharding, random initialisation and the memory plan are maps over that
description. A parameter's path in the module tree is its tensor name in a released checkpoint
(`layers.3.attn.wq_a.weight`); expert matrices are stacked over the experts on a leading axis
(`layers.3.ffn.experts.w1`).

The value of a parameter is an f32 array, or, under packed weights, what `packed` makes of it: the bytes of a released
tensor and of its scales together.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, UInt8

from widemesh.pallas_kernels.formats import FP8_GROUP, MXFP4_GROUP, decode_e8m0
from widemesh.pallas_kernels.grouped_moe import PackedMatrix

Stored = Literal["f32", "bf16", "fp8", "fp8_rows", "fp4"]
"""Form of a parameter under packed weights: `fp8` with a scale per 32 x 32 block, `fp8_rows` per row and 32 columns."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockScaled:
    """A matrix in FP8: E4M3 codes, and a power-of-two scale (E8M0) per block of 32 x 32, partial at the far edges."""

    codes: UInt8[Array, "O K"]
    scales: UInt8[Array, "bo bk"]

    def decode(self) -> Float[Array, "O K"]:
        """The values in bfloat16, which holds every one of them."""
        rows, columns = self.codes.shape
        values = lax.bitcast_convert_type(self.codes, jnp.float8_e4m3fn).astype(jnp.bfloat16)
        scales = decode_e8m0(self.scales).astype(jnp.bfloat16)  # type: ignore[union-attr]
        if rows % FP8_GROUP or columns % FP8_GROUP:
            wide = jnp.repeat(jnp.repeat(scales, FP8_GROUP, axis=0), FP8_GROUP, axis=1)
            return values * wide[:rows, :columns]
        blocks = values.reshape(rows // FP8_GROUP, FP8_GROUP, columns // FP8_GROUP, FP8_GROUP)
        return (blocks * scales[:, None, :, None]).reshape(rows, columns)


def param(*dims: tuple[int, str | None], stored: Stored = "f32") -> nnx.Param:
    """An abstract f32 parameter from (size, logical axis) pairs, and the form that it has under packed weights."""
    shape = tuple(size for size, _ in dims)
    return nnx.Param(
        jax.ShapeDtypeStruct(shape, jnp.float32), axes=tuple(axis for _, axis in dims), stored=stored
    )


def packed(abstract: jax.ShapeDtypeStruct, stored: Stored) -> Any:
    """What a parameter is under packed weights: arrays (abstract) that have its logical axes, each.

    Raises ValueError for a width that FP4 cannot pack two to a byte.
    """
    *lead, rows, columns = abstract.shape if len(abstract.shape) > 1 else (1, *abstract.shape)

    def array(*shape: int, dtype: Any = jnp.uint8) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    if stored == "fp8":
        return BlockScaled(array(rows, columns), array(-(-rows // FP8_GROUP), -(-columns // FP8_GROUP)))  # type: ignore[arg-type]
    if stored == "fp8_rows":
        return array(rows, columns + -(-columns // FP8_GROUP))
    if stored == "fp4":
        if columns % 2:
            raise ValueError(f"a matrix of {columns} columns cannot be packed two to a byte; use f32 weights")
        codes, scales = array(*lead, rows, columns // 2), array(*lead, rows, -(-columns // MXFP4_GROUP))
        return PackedMatrix(codes=codes, scales=scales)  # type: ignore[arg-type]
    return array(*abstract.shape, dtype=jnp.bfloat16 if stored == "bf16" else jnp.float32)


def value(p: nnx.Param) -> Any:
    """The array of a parameter, or its packed form."""
    return p.get_value()


def matrix(p: nnx.Param) -> Float[Array, "O K"]:
    """The parameter as an operand of a product: f32 as it is, packed forms in bfloat16."""
    held = p.get_value()
    return held.decode() if isinstance(held, BlockScaled) else held


def is_engram_table(path: tuple[Any, ...]) -> bool:
    """Whether the parameter at this path of the state is a table of n-gram rows, the only kind read by row."""
    return path[-3:] == ("engram", "embed", "weight")
