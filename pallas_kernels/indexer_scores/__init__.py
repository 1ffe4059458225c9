"""Index scores of compressed entries."""

from widemesh.pallas_kernels.indexer_scores.reference import indexer_scores

__all__ = ["indexer_scores"]
