"""Routed experts over rows grouped by expert."""

from widemesh.pallas_kernels.grouped_moe.expert import ExpertMath
from widemesh.pallas_kernels.grouped_moe.op import grouped_moe

__all__ = ["ExpertMath", "grouped_moe"]
