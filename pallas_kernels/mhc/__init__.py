"""Coefficients, collapse and expand of the residual streams, one by one and as one step between sublayers."""

from widemesh.pallas_kernels.mhc.op import mhc_advance, mhc_site
from widemesh.pallas_kernels.mhc.reference import coefficients, collapse, expand, sinkhorn

__all__ = ["coefficients", "collapse", "expand", "mhc_advance", "mhc_site", "sinkhorn"]
