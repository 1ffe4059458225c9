"""A machine that compiles for GPUs and has none: jax is kept to its CPU, without a word about missing libraries.

The `aot` extra installs jax's CUDA plugin without the CUDA libraries that running needs. Left alone, jax tries the
plugin first on every start and logs a traceback over the library that it misses, before it takes the CPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os

_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_RUNTIME = ("nvidia.cudnn", "nvidia.cu13")  # what the `cuda12` and `cuda13` extras install and `aot` does not
_DRIVER = "libcuda.so.1"


def keep_to_cpu() -> None:
    """Sets JAX_PLATFORMS=cpu if the plugin is there, its libraries and the driver are not, and nothing is set.

    Call it before jax is imported. Where the driver or the libraries are there, a message of jax's is worth reading.
    """
    if "JAX_PLATFORMS" in os.environ or not _any_installed(_PLUGINS) or _any_installed(_RUNTIME):
        return
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        os.environ["JAX_PLATFORMS"] = "cpu"


def _any_installed(names: tuple[str, ...]) -> bool:
    for name in names:
        try:
            if importlib.util.find_spec(name) is not None:
                return True
        except ModuleNotFoundError:  # the package around it is missing
            continue
    return False
