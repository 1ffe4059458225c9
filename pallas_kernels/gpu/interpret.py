"""Running GPU kernels on a CPU, in the Pallas GPU interpreter with race detection.

Inside `interpreted()` every kernel of the package runs interpreted, as if the default device were the given GPU. The
state is part of the key of jax's caches, so that a program traced inside is never taken for one traced outside.

The interpreter lacks a few operations. Where a kernel needs one of them it asks `is_interpreted()` while it is traced
and puts a staged form in the place of that one operation; it declares so with `swap(...)`, since what is swapped was
never executed anywhere but on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from widemesh.pallas_kernels.gpu.targets import TARGETS, GpuTarget

_target = jax.make_user_context(None)  # name of the target that is interpreted
_swaps: list[Swap] = []


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Swap:
    """One operation of one kernel that the interpreter does not run."""

    kernel: str
    missing: str  # the operation on the GPU
    staged: str  # what runs in its place in the interpreter


@contextlib.contextmanager
def interpreted(target: str = "H200") -> Iterator[GpuTarget]:
    """Inside, kernels run in the interpreter with the variants and tiles that they would have on `target`.

    An error inside an interpreted kernel leaves the interpreter's state behind; it is cleared on the way out. Raises
    ValueError for an unknown target.
    """
    if target not in TARGETS:
        raise ValueError(f"target={target!r} must be one of {', '.join(TARGETS)}")
    with _target(target):
        try:
            yield TARGETS[target]
        except BaseException:
            # jax documents this call for use after an error and exports it nowhere.
            from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

            gpu_callbacks.reset_gpu_interpret_mode_state()
            raise


def interpreted_target() -> GpuTarget | None:
    """The target of the innermost `interpreted()`, None outside of it."""
    return None if _target.value is None else TARGETS[_target.value]


def is_interpreted() -> bool:
    """Whether kernels that are traced now run in the interpreter. A static Python value."""
    return _target.value is not None


def kernel_options() -> dict[str, Any]:
    """Keywords for `plgpu.kernel`: the interpreter with race detection inside `interpreted()`, else nothing."""
    if not is_interpreted():
        return {}
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return {"interpret": plgpu.InterpretGPUParams(detect_races=True)}


def swap(*, kernel: str, missing: str, staged: str) -> Swap:
    """Declares, once at module level beside the kernel, an operation that is replaced when interpreted."""
    declared = Swap(kernel=kernel, missing=missing, staged=staged)
    if declared not in _swaps:
        _swaps.append(declared)
    return declared


def swaps() -> tuple[Swap, ...]:
    """All swaps declared by the modules that are imported so far, in order."""
    return tuple(sorted(_swaps))
