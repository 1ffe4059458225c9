"""Meshes over disjoint device sets: one for prefill, one for decode."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from widemesh.sharding.axes import EP_AXIS, TP_AXIS

_FLAG = "--xla_force_host_platform_device_count"


class MeshError(RuntimeError):
    """The devices asked for are not there. The message names the setting to use."""


@dataclasses.dataclass(frozen=True)
class MeshPair:
    """The two meshes of one process; their device sets are disjoint."""

    prefill: Mesh
    decode: Mesh


def request_cpu_devices(count: int) -> None:
    """Ask XLA for `count` virtual CPU devices, unless the environment already names a number.

    Has an effect only before JAX creates its backends; later, `make_meshes` reports the shortage.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={count}".strip()


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of `ep` = all the devices, `tp` = 1."""
    grid = np.array(devices).reshape(len(devices), 1)
    return Mesh(grid, (EP_AXIS, TP_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def make_meshes(prefill_devices: int, decode_devices: int) -> MeshPair:
    """Prefill on the first devices, decode on the next ones. Raises MeshError when there are too few."""
    devices = jax.devices()
    wanted = prefill_devices + decode_devices
    if len(devices) < wanted:
        remedy = (
            f"set XLA_FLAGS={_FLAG}={wanted} before JAX is first used (it has started with {len(devices)})"
            if devices[0].platform == "cpu"
            else "use fewer prefill_devices or decode_devices"
        )
        raise MeshError(
            f"prefill_devices={prefill_devices} and decode_devices={decode_devices} need {wanted} devices but JAX "
            f"has {len(devices)} of kind {devices[0].platform}; {remedy}"
        )
    return MeshPair(make_mesh(devices[:prefill_devices]), make_mesh(devices[prefill_devices:wanted]))
