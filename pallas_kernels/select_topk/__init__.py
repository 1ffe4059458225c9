"""Top-k selection of compressed entries and of candidate blocks."""

from widemesh.pallas_kernels.select_topk.bisect import select_mask
from widemesh.pallas_kernels.select_topk.candidates import candidate_mask
from widemesh.pallas_kernels.select_topk.causal import select_mask_causal
from widemesh.pallas_kernels.select_topk.reference import select_indices

__all__ = ["candidate_mask", "select_indices", "select_mask", "select_mask_causal"]
