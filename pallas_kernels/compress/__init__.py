"""Pooling of tokens into compressed latents."""

from widemesh.pallas_kernels.compress.reference import pool_group

__all__ = ["pool_group"]
