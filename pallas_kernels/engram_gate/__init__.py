"""Lookup, gate and update of the Engram sublayer."""

from widemesh.pallas_kernels.engram_gate.op import engram_apply, engram_rows
from widemesh.pallas_kernels.engram_gate.reference import engram_gate, engram_update

__all__ = ["engram_apply", "engram_gate", "engram_rows", "engram_update"]
