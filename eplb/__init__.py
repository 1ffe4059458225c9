"""Placement of experts on physical slots."""

from widemesh.eplb.placement import initial_slot_owner

__all__ = ["initial_slot_owner"]
