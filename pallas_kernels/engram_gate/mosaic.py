"""The GPU kernels of Engram, one file each."""

from widemesh.pallas_kernels.engram_gate.mosaic_apply import engram_apply
from widemesh.pallas_kernels.engram_gate.mosaic_rows import engram_rows

__all__ = ["engram_apply", "engram_rows"]
