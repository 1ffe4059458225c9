"""Pooling of tokens into compressed latents, and their way into the pages."""

from widemesh.pallas_kernels.compress.op import compress_and_store
from widemesh.pallas_kernels.compress.reference import pool_group

__all__ = ["compress_and_store", "pool_group"]
