"""Devices of a GPU that is not there: enough for jax to place arrays on them and to compile, and no more."""

from __future__ import annotations

import functools

import jax
from jax.experimental import topologies

from widemesh.pallas_kernels.gpu.targets import TARGETS, GpuTarget
from widemesh.pallas_kernels.gpu.toolchain import prepare

GPUS_PER_HOST = 8

# Mosaic keeps the first architecture of a process and fails for any other with an unrelated message.
_process_archs: set[str] = set()


@functools.cache
def topology(target: str, devices: int = 1) -> tuple[jax.Device, ...]:
    """`devices` GPUs of one kind, on hosts of eight; use them in a `Mesh` or a `SingleDeviceSharding`.

    Raises ValueError for an unknown target or a number of devices that no whole hosts hold, RuntimeError if this
    process has compiled for another architecture, ToolchainError if the compiler is not installed.
    """
    if target not in TARGETS:
        raise ValueError(f"target={target!r} must be one of {', '.join(TARGETS)}")
    if devices < 1 or (devices > GPUS_PER_HOST and devices % GPUS_PER_HOST):
        raise ValueError(f"devices={devices} must be 1 to {GPUS_PER_HOST} or a multiple of {GPUS_PER_HOST}")
    arch = TARGETS[target].arch
    others = _process_archs - {arch}
    if others:
        raise RuntimeError(f"this process compiles for {others.pop()}; start another one for {target} ({arch})")
    prepare()
    hosts = max(devices // GPUS_PER_HOST, 1)
    described = topologies.get_topology_desc(
        platform="cuda",
        target_config=_target_config(TARGETS[target]),
        topology=f"1x{hosts}x{devices // hosts}",  # partitions, hosts, GPUs of a host
    )
    _process_archs.add(arch)
    return tuple(described.devices)


def _target_config(target: GpuTarget) -> str:
    """The compiler's description of a GPU: a text GpuTargetConfigProto, device facts only."""
    info = {
        "name": f'"{target.device_kind}"',
        "device_vendor": '"NVIDIA Corporation"',
        "core_count": target.cores,
        "clock_rate_ghz": target.clock_ghz,
        "fpus_per_core": 128,
        "threads_per_warp": 32,
        "threads_per_block_limit": 1024,
        "threads_per_core_limit": 2048,
        "registers_per_block_limit": 65_536,
        "registers_per_core_limit": 65_536,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_block_optin": target.smem_bytes,
        "shared_memory_per_core": 233_472,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "l2_cache_size": target.l2_bytes,
        "memory_bandwidth": int(target.hbm_bytes_per_s),
        "device_memory_size": target.hbm_bytes,
        "device_address_bits": 64,
        "ecc_enabled": "true",
        "driver_version": '"13.0.0"',
        "runtime_version": '"12.9.0"',
        "compile_time_toolkit_version": '"12.9.0"',
        "dnn_version": '"9.10.0"',
    }
    capability = f"{{ major: {target.major} minor: {target.minor} feature_extension: ACCELERATED_FEATURES }}"
    lines = [f"  {field}: {fact}" for field, fact in info.items()]
    return "\n".join(
        (
            "gpu_device_info {",
            *lines,
            f"  cuda_compute_capability {capability}",
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 10 }",
            f'device_description_str: "{target.device_kind}"',
        )
    )
