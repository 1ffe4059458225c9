"""Which implementation of an op runs: by the default device, unless the caller says which."""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal, get_args

import jax

from widemesh.pallas_kernels.gpu.interpret import interpreted_target
from widemesh.pallas_kernels.gpu.targets import GpuTarget, by_capability, supported

Implementation = Literal["reference", "mosaic"]

_log = logging.getLogger(__name__)


def choose(op: str, implementation: Implementation | None) -> Implementation:
    """The implementation to trace for `op` on the default device.

    None chooses: "mosaic" on a supported GPU (a device of a topology while compiling ahead of time, or of the
    interpreter, counts), else "reference"; on an unsupported GPU one line in the log says so. "mosaic" where it
    cannot run raises ValueError that names the supported architectures.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(f"implementation={implementation!r} of {op} must be one of {get_args(Implementation)} or None")
    if implementation == "reference":
        return implementation
    if device_target() is not None:
        return "mosaic"
    kind = _kind(_default_device())
    if implementation == "mosaic":
        raise ValueError(
            f"implementation='mosaic' of {op} is written for {supported()}, and the default device is {kind}; "
            "leave implementation=None for the reference"
        )
    if _default_device().platform == "gpu":
        _log_unsupported(kind)
    return "reference"


def device_target() -> GpuTarget | None:
    """The kind of the default device, by its compute capability; None if no kernel is written for it."""
    target = interpreted_target()
    if target is not None:
        return target
    device = _default_device()
    if device.platform != "gpu":
        return None
    return by_capability(getattr(device, "compute_capability", ""), device.device_kind)


def _default_device() -> Any:
    """The device of `jax.default_device`, else the first one. Part of the key of jax's caches."""
    device = jax.config.jax_default_device
    if isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device or jax.local_devices()[0]


def _kind(device: Any) -> str:
    """Name of a device in a message."""
    if device.platform != "gpu":
        return f"a {device.platform}"
    return f"{device.device_kind} (compute capability {getattr(device, 'compute_capability', 'unknown')})"


@functools.cache
def _log_unsupported(kind: str) -> None:
    """Once per kind and process."""
    _log.warning("%s: GPU kernels are written for %s; the reference implementations run instead", kind, supported())
