"""The GPUs that kernels are written for, with the device facts that floors, tile heuristics and the compiler need.

Rates are the vendor's dense figures of the SXM and HGX parts; they bound a floor and promise nothing.
"""

from __future__ import annotations

import dataclasses

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """One kind of GPU. Bytes and rates are of one device."""

    name: str
    device_kind: str  # what the driver calls the device
    major: int  # compute capability
    minor: int
    cores: int  # streaming multiprocessors
    clock_ghz: float
    l2_bytes: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    bf16_flops: float  # per second, dense
    fp8_flops: float
    smem_bytes: int = 232_448  # the most shared memory of one block: 227 KiB
    registers: int = 255  # the most registers of one thread

    @property
    def compute_capability(self) -> str:
        """As jax writes it, such as "9.0"."""
        return f"{self.major}.{self.minor}"

    @property
    def arch(self) -> str:
        """The compiler's name for the instruction set with its architecture-specific part, such as "sm_90a"."""
        return f"sm_{self.major}{self.minor}a"

    @property
    def is_blackwell(self) -> bool:
        """True where matrix products are tcgen05 over tensor memory, False where they are wgmma over registers."""
        return self.major == 10


_H100 = GpuTarget(
    name="H100", device_kind="NVIDIA H100 80GB HBM3", major=9, minor=0, cores=132, clock_ghz=1.98, l2_bytes=50 * _MIB,
    hbm_bytes=84_942_979_072, hbm_bytes_per_s=3.35e12, bf16_flops=989e12, fp8_flops=1979e12,
)  # fmt: skip
_H200 = dataclasses.replace(
    _H100, name="H200", device_kind="NVIDIA H200", hbm_bytes=150_000_000_000, hbm_bytes_per_s=4.8e12
)
_B200 = GpuTarget(
    name="B200", device_kind="NVIDIA B200", major=10, minor=0, cores=148, clock_ghz=1.965, l2_bytes=126 * _MIB,
    hbm_bytes=191_514_411_008, hbm_bytes_per_s=7.7e12, bf16_flops=2250e12, fp8_flops=4500e12,
)  # fmt: skip
_B300 = dataclasses.replace(
    _B200, name="B300", device_kind="NVIDIA B300", minor=3, clock_ghz=1.92, hbm_bytes=288_000_000_000,
    hbm_bytes_per_s=8.0e12,
)  # fmt: skip

TARGETS: dict[str, GpuTarget] = {target.name: target for target in (_H100, _H200, _B200, _B300)}
"""By name."""


def by_capability(compute_capability: str, device_kind: str) -> GpuTarget | None:
    """The target of a device that jax describes so, or None if no kernel is written for it.

    Devices of one instruction set differ in memory only: the name in `device_kind` decides, else the smaller one.
    """
    alike = [target for target in TARGETS.values() if target.compute_capability == compute_capability]
    named = [target for target in alike if target.name in device_kind]
    return next(iter(named or alike), None)


def supported() -> str:
    """The architectures that kernels are written for, in words for a message."""
    names: dict[str, list[str]] = {}
    for target in TARGETS.values():
        names.setdefault(target.arch, []).append(target.name)
    return ", ".join(f"{arch} ({' and '.join(kinds)})" for arch, kinds in names.items())
