"""Routed experts over rows grouped by expert."""

from widemesh.pallas_kernels.grouped_moe.expert import ExpertMath
from widemesh.pallas_kernels.grouped_moe.op import grouped_moe
from widemesh.pallas_kernels.grouped_moe.packed import PackedExperts, PackedMatrix
from widemesh.pallas_kernels.grouped_moe.packed_op import grouped_moe_packed

__all__ = ["ExpertMath", "PackedExperts", "PackedMatrix", "grouped_moe", "grouped_moe_packed"]
