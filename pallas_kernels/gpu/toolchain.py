"""What compiling for a GPU without one needs: jax's CUDA plugin and NVIDIA's assembler, ptxas."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import jax

_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_WHEELS = ("nvidia.cuda_nvcc", "nvidia.cu13")
_CUDA_HOME = Path("/usr/local/cuda")


class ToolchainError(RuntimeError):
    """Something that compiling ahead of time needs is not installed; the message says how to install it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toolchain:
    """The tools that compile in this process."""

    ptxas: str  # path
    ptxas_version: str  # such as "12.9.86"


def has_plugin() -> bool:
    """Whether a CUDA plugin of jax is installed. It need not work: no driver and no GPU is asked for."""
    return any(_is_installed(name) for name in _PLUGINS)


def prepare() -> Toolchain:
    """Makes this process ready to compile ahead of time; call it before jax has started a backend.

    jax is kept to the CPU platform, which registers the plugin without asking for a driver, and the ptxas found by
    `find_ptxas` is put first on PATH, where the compiler looks first. Raises ToolchainError for what is missing.
    """
    if not has_plugin():
        raise ToolchainError("compiling for a GPU needs jax's CUDA plugin; run pip install 'widemesh[aot]'")
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    ptxas = find_ptxas()
    folder = str(ptxas.parent)
    path = os.environ.get("PATH", "")
    if path.split(os.pathsep)[0] != folder:
        os.environ["PATH"] = f"{folder}{os.pathsep}{path}"
    return Toolchain(ptxas=str(ptxas), ptxas_version=_version(ptxas))


def find_ptxas() -> Path:
    """The ptxas of NVIDIA's wheel, which pip installs beside jax; else the one on PATH; else CUDA's usual home.

    Raises ToolchainError if there is none.
    """
    for wheel in _WHEELS:
        spec = importlib.util.find_spec(wheel) if _is_installed(wheel) else None
        for home in (spec.submodule_search_locations or []) if spec else []:
            if (Path(home) / "bin" / "ptxas").is_file():
                return Path(home) / "bin" / "ptxas"
    on_path = shutil.which("ptxas")
    if on_path is not None:
        return Path(on_path)
    if (_CUDA_HOME / "bin" / "ptxas").is_file():
        return _CUDA_HOME / "bin" / "ptxas"
    raise ToolchainError(
        f"ptxas is neither in a wheel, on PATH, nor in {_CUDA_HOME}/bin; run pip install 'widemesh[aot]'"
    )


def _is_installed(name: str) -> bool:
    """Whether a module can be imported, asked without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def _version(ptxas: Path) -> str:
    """Such as "12.9.86"."""
    text = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V([\d.]+)", text)
    return found[1] if found else "unknown"
