"""Expert matrices as they lie in memory: FP4 codes, two to a byte, and one power-of-two scale per 32 input columns."""

from __future__ import annotations

import dataclasses
from typing import cast

import jax
from jaxtyping import Array, Float32, UInt8

from widemesh.pallas_kernels.formats import MXFP4_GROUP, decode_mxfp4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """X stacked [O, K] matrices of E2M1 values, the even column in the low nibble, scales E8M0.

    A short last group of 32 columns has a scale of its own.
    """

    codes: UInt8[Array, "X O K/2"]
    scales: UInt8[Array, "X O groups"]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(X, O, K): of the values, not of the bytes."""
        held, rows, half = self.codes.shape
        return held, rows, 2 * half

    def decode(self) -> Float32[Array, "X O K"]:
        """The values, exact in bfloat16 too."""
        return cast(Array, decode_mxfp4(self.codes, self.scales))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedExperts:
    """X gated experts: w1 (gate) and w3 (up) are [F, D], w2 (down) is [D, F]."""

    w1: PackedMatrix
    w3: PackedMatrix
    w2: PackedMatrix

    @property
    def held(self) -> int:
        """X, the expert slots here."""
        return self.w1.shape[0]

    @property
    def hidden(self) -> int:
        """D, the width of a row."""
        return self.w1.shape[2]

    @property
    def width(self) -> int:
        """F, the width of an expert."""
        return self.w1.shape[1]

    def check(self, hidden: int) -> None:
        """ValueError if the six arrays do not describe experts on rows of `hidden` values."""
        into, out = (self.held, self.width, hidden), (self.held, hidden, self.width)
        for name, matrix, shape in (("w1", self.w1, into), ("w3", self.w3, into), ("w2", self.w2, out)):
            if matrix.shape != shape:
                raise ValueError(f"{name} holds matrices {matrix.shape} for rows of {hidden} values; make it {shape}")
            scales = (*shape[:2], -(-shape[2] // MXFP4_GROUP))
            if matrix.scales.shape != scales:
                raise ValueError(
                    f"{name}.scales is {matrix.scales.shape}; with a byte per {MXFP4_GROUP} columns it is {scales}"
                )
