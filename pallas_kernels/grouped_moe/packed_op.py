"""Dispatch of the grouped mixture of experts on FP4 matrices."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int32

from widemesh.pallas_kernels.gpu import Implementation, choose
from widemesh.pallas_kernels.grouped_moe.expert import ExpertMath
from widemesh.pallas_kernels.grouped_moe.packed import PackedExperts
from widemesh.pallas_kernels.grouped_moe.packed_reference import moe_packed_reference


def grouped_moe_packed(
    x: Float[Array, "T D"],
    slots: Int32[Array, "T K"],
    weights: Float32[Array, "T K"],
    experts: PackedExperts,
    math: ExpertMath,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float32[Array, "T D"], Int32[Array, "X"]]:
    """Weighted sum of the selected experts held here (f32), and how many pairs (row, k) chose each slot.

    A slot outside 0..X-1 adds nothing. No row is dropped, however crowded an expert is, and a row's result does not
    depend on how the work was scheduled. The activation roundings are as `math` says; the kernel multiplies bfloat16
    activations with f32 sums whether or not they are FP8 values. Raises ValueError if the matrices do not fit `x`, and
    for the kernel if D or F are no multiple of 256 (D: 512 on Blackwell).
    """
    experts.check(x.shape[-1])
    if choose("grouped_moe_packed", implementation) == "reference":
        return moe_packed_reference(x, slots, weights, experts, math)
    # Kernels are imported where they run: a CPU process needs neither their modules nor their start-up time.
    from widemesh.pallas_kernels.grouped_moe.mosaic import moe_packed_mosaic

    return moe_packed_mosaic(x, slots, weights, experts, math)
