"""How much memory there is, and the refusal of a plan that needs more: at start-up, not at step 10,000."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

import jax

from widemesh.model.config import ConfigError
from widemesh.serving.memory_plan import MemoryPlan, MeshMemory, format_bytes

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AvailableMemory:
    """Bytes that may still be allocated."""

    num_bytes: int
    is_shared: bool  # by all ranks, as the virtual devices of a CPU do; else each rank has so many


def available_memory(devices: Iterable[jax.Device]) -> AvailableMemory | None:
    """Memory of the machine for CPU devices, else of the device that has least. None where the backend does not say."""
    found = list(devices)
    if all(device.platform == "cpu" for device in found):
        return AvailableMemory(num_bytes=host_bytes(), is_shared=True)
    free = []
    for device in found:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        free.append(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return AvailableMemory(num_bytes=min(free), is_shared=False)


def host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that this process can still get: what the machine has free, within the limit of its container."""
    machine = _machine_bytes(meminfo)
    container = _container_bytes(cgroup)
    return machine if container is None else min(machine, container)


def _machine_bytes(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_bytes(cgroup: Path) -> int | None:
    """Limit minus use, or None where there is no limit. Cached files count as use until they are needed elsewhere."""
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        stats = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(stats.get("inactive_file", 0)))


def refuse_if_too_large(plan: MemoryPlan, available: AvailableMemory | None, num_processes: int = 1) -> None:
    """Raise ConfigError with the numbers and the settings to lower if the plan does not fit. None: nothing is known.

    Of `num_processes`, each holds an equal part of the plan.
    """
    if available is None:
        return
    if available.is_shared:
        _refuse(plan, plan.meshes, "the engine" if num_processes == 1 else "a process",
                sum(mesh.total_bytes for mesh in plan.meshes) // num_processes, available.num_bytes)  # fmt: skip
        return
    for mesh in plan.meshes:
        _refuse(plan, (mesh,), f"a rank of the {mesh.name} mesh", mesh.rank_bytes, available.num_bytes)


def _refuse(plan: MemoryPlan, meshes: tuple[MeshMemory, ...], what: str, needed: int, available: int) -> None:
    if needed <= available:
        return
    fixed = sum(mesh.kind_bytes("parameters") * (mesh.devices if len(meshes) > 1 else 1) for mesh in meshes)
    details = "; ".join(f"{mesh.name}, {mesh.devices} x {format_bytes(mesh.rank_bytes)}: {_largest(mesh)}"
                        for mesh in meshes)  # fmt: skip
    if fixed > available:
        remedy = f"its parameters alone are {format_bytes(fixed)}, so use fewer ranks a machine or a larger machine"
    else:
        config, sizes = plan.config, plan.config.scheduler
        remedy = (
            f"lower num_pages={sizes.decode_pages}, num_prefill_pages={sizes.prefill_pages}, "
            f"max_num_seqs={config.max_num_seqs}, max_model_len={config.max_model_len} or "
            f"max_num_batched_tokens={config.max_num_batched_tokens}"
        )
    raise ConfigError(f"{what} needs {format_bytes(needed)} of memory and {format_bytes(available)} are available "
                      f"({details}); {remedy}")  # fmt: skip


def _largest(mesh: MeshMemory, count: int = 4) -> str:
    """The largest parts of one rank."""
    parts = sorted(mesh.parts, key=lambda part: -part.num_bytes)[:count]
    return ", ".join(f"{part.name} {format_bytes(part.num_bytes)}" for part in parts)
