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
    """The two meshes of one engine; their device sets are disjoint."""

    prefill: Mesh
    decode: Mesh


def request_cpu_devices(count: int) -> None:
    """Ask XLA for `count` virtual CPU devices, unless the environment already names a number.

    Has an effect only before JAX creates its backends; later, `make_meshes` reports the shortage.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={count}".strip()


def make_mesh(devices: Sequence[jax.Device], tensor_parallel_size: int = 1) -> Mesh:
    """A mesh of `tp` = `tensor_parallel_size` neighbours each, `ep` = the number of such groups.

    Raises MeshError where the devices do not make whole groups.
    """
    if len(devices) % tensor_parallel_size:
        raise MeshError(f"tensor_parallel_size={tensor_parallel_size} does not divide {len(devices)} devices; use a "
                        "number of devices that is a multiple of it")  # fmt: skip
    grid = np.array(devices).reshape(-1, tensor_parallel_size)
    return Mesh(grid, (EP_AXIS, TP_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def make_meshes(
    prefill_devices: int, decode_devices: int, tensor_parallel_size: int = 1, num_processes: int = 1
) -> MeshPair:
    """Of every process, prefill takes the first devices and decode the next ones, in the order of the processes.

    The numbers are totals; each process gives an equal part. Raises MeshError when one has too few.
    """
    groups: tuple[list[jax.Device], list[jax.Device]] = ([], [])
    for process in range(num_processes):
        devices = sorted((d for d in jax.devices() if d.process_index == process), key=lambda device: device.id)
        prefill, wanted = prefill_devices // num_processes, (prefill_devices + decode_devices) // num_processes
        if len(devices) < wanted:
            platform = jax.devices()[0].platform
            whose = "" if num_processes == 1 else f" of each of {num_processes} processes"
            has = "JAX has" if num_processes == 1 else f"process {process} has"
            remedy = (
                f"set XLA_FLAGS={_FLAG}={wanted} before JAX is first used (it has started with {len(devices)})"
                if platform == "cpu"
                else "use fewer prefill_devices or decode_devices"
            )
            raise MeshError(
                f"prefill_devices={prefill_devices} and decode_devices={decode_devices} need {wanted} devices{whose} "
                f"but {has} {len(devices)} of kind {platform}; {remedy}"
            )
        groups[0].extend(devices[:prefill])
        groups[1].extend(devices[prefill:wanted])
    return MeshPair(make_mesh(groups[0], tensor_parallel_size), make_mesh(groups[1], tensor_parallel_size))
