"""From a row's experts to the slots that serve it, and how many rows each slot is sent."""

from widemesh.pallas_kernels.route.reference import choose_slots, count_rows

__all__ = ["choose_slots", "count_rows"]
