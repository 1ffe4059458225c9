"""What every GPU kernel shares: the supported chips, the choice of implementation, the interpreter, the compiler."""

from widemesh.pallas_kernels.gpu.choose import Implementation, choose, device_target
from widemesh.pallas_kernels.gpu.interpret import interpreted, is_interpreted, kernel_options, swap
from widemesh.pallas_kernels.gpu.targets import TARGETS, GpuTarget

__all__ = [
    "TARGETS",
    "GpuTarget",
    "Implementation",
    "choose",
    "device_target",
    "interpreted",
    "is_interpreted",
    "kernel_options",
    "swap",
]
