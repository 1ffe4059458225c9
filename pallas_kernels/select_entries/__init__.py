"""Index scores and the selection of entries by them, in one op."""

from widemesh.pallas_kernels.select_entries.op import select_entries
from widemesh.pallas_kernels.select_entries.selected import Selected

__all__ = ["Selected", "select_entries"]
