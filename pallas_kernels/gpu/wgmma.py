"""Hopper's tensor-core product, with its operands checked for races when interpreted."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from widemesh.pallas_kernels.gpu.interpret import is_interpreted


def wgmma(acc: Any, a: Any, b: Any) -> None:
    """`plgpu.wgmma(acc, a, b)`: acc += a @ b, a in registers or shared memory, b in shared memory.

    The interpreter computes a wgmma when it is issued and asks nobody whether its operands have arrived, so that a
    forgotten wait changes neither a value nor a race report. Interpreted, both are read first, as any load is.
    As after any load, `commit_smem` must come before a bulk copy overwrites them.
    """
    if is_interpreted():
        for operand in (a, b):
            if hasattr(operand, "at"):
                plgpu.load(operand)
    plgpu.wgmma(acc, a, b)
