"""Coefficients, collapse and expand of the residual streams."""

from widemesh.pallas_kernels.mhc.reference import coefficients, collapse, expand, sinkhorn

__all__ = ["coefficients", "collapse", "expand", "sinkhorn"]
