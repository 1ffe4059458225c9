"""Gate and update of the Engram sublayer."""

from widemesh.pallas_kernels.engram_gate.reference import engram_gate, engram_update

__all__ = ["engram_gate", "engram_update"]
