"""One process per architecture: the compiler keeps the first architecture of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from widemesh.pallas_kernels.gpu.targets import TARGETS
from widemesh.pallas_kernels.gpu.toolchain import ToolchainError, has_plugin

TIMEOUT_S = 900


def run_targets(
    targets: Sequence[str], ops: Sequence[str] = (), *, show_progress: bool = False
) -> Iterator[dict[str, Any]]:
    """Compiles all cases in a process per architecture, one after the other, and gives what each printed.

    See `aot.py` for the report. `show_progress` passes standard error on. Raises ToolchainError if the compiler is
    not installed, RuntimeError with the end of its standard error if a process printed no report, and TimeoutExpired
    if one takes 15 minutes.
    """
    if not has_plugin():
        raise ToolchainError("compiling for a GPU needs jax's CUDA plugin; run pip install 'widemesh[aot]'")
    chosen = [argument for op in ops for argument in ("--op", op)]
    by_arch: dict[str, list[str]] = {}
    for target in targets:
        by_arch.setdefault(TARGETS[target].arch, []).append(target)
    for alike in by_arch.values():
        yield run_module("widemesh.pallas_kernels.gpu.aot", *alike, *chosen, show_progress=show_progress)


def run_module(module: str, *arguments: str, show_progress: bool = False) -> dict[str, Any]:
    """Runs a module whose last line on standard output is a JSON object, with `environment()`."""
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=None if show_progress else subprocess.PIPE,
        text=True,
        env=environment(),
        timeout=TIMEOUT_S,
    )
    lines = process.stdout.splitlines()
    if not lines:
        said = (process.stderr or "").strip()[-2000:]
        raise RuntimeError(f"{module} {' '.join(arguments)} printed no report: {said}")
    return json.loads(lines[-1])


def environment() -> dict[str, str]:
    """The variables of a process that compiles ahead of time.

    No driver is asked for, nothing comes from the compilation cache (a kernel from there has no report), and the
    flags of this process, such as a test's fewer compiler passes, are not handed on.
    """
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "1",  # leaves out the note that there is no driver
    }
