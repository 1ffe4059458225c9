"""Facts of kernels from what the compiler prints: resources while lowering, then PTX and ptxas' report.

The compiler dumps to standard output when told to by environment variables; its dump into a folder writes every pass
besides, and takes twice the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from widemesh.pallas_kernels.gpu.facts import KernelFacts

INSTRUCTIONS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "cp.async.bulk")

_FLAGS = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")
_SUFFIX = "_mosaic_gpu_kernel"
_ENTRY = re.compile(rf"\.visible \.entry (\S+?){_SUFFIX}\(")
_REPORT = re.compile(
    rf"Compiling entry function '(?P<name>\S+?){_SUFFIX}' for '(?P<arch>\w+)'"
    r".*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)
_BARRIERS = re.compile(r"num_barriers=(\d+)[^)]*\): (\d+)")


@contextlib.contextmanager
def recorded() -> Iterator[list[KernelFacts]]:
    """Collects the facts of the kernels that are compiled inside; the list is filled on the way out.

    Everything the process writes to its standard output meanwhile is taken for the compiler's: report progress on
    standard error.
    """
    facts: list[KernelFacts] = []
    resources: dict[str, str] = {}
    before = {flag: os.environ.get(flag) for flag in _FLAGS}
    os.environ.update(dict.fromkeys(_FLAGS, "1"))
    try:
        with _resources_into(resources), _stdout_into() as printed:
            yield facts
        facts.extend(parse(printed[0], resources))
    finally:
        for flag, value in before.items():
            if value is None:
                os.environ.pop(flag, None)
            else:
                os.environ[flag] = value


def parse(printed: str, resources: dict[str, str]) -> list[KernelFacts]:
    """Facts of all kernels in PTX and reports, in their order; `resources` by kernel name."""
    ptx: dict[str, list[str]] = {}
    entries = list(_ENTRY.finditer(printed))
    for entry, following in itertools.zip_longest(entries, entries[1:]):
        body = printed[entry.start() : following.start() if following else None]
        ptx.setdefault(entry[1], []).append(body)
    facts = []
    for report in _REPORT.finditer(printed):
        name = report["name"]
        of_kernel = ptx.get(name)
        if not of_kernel or name not in resources:
            raise RuntimeError(f"the compiler reported on kernel {name!r} and printed no PTX or no resources of it")
        body = of_kernel.pop(0) if len(of_kernel) > 1 else of_kernel[0]
        facts.append(
            KernelFacts(
                name=name,
                arch=report["arch"],
                registers=int(report["registers"]),
                spill_bytes=int(report["stores"]) + int(report["loads"]),
                smem_bytes=smem_bytes(resources[name]),
                tmem_columns=_number("tmem_scratch_cols", resources[name]),
                instructions={instruction: _count(instruction, body) for instruction in INSTRUCTIONS},
            )
        )
    return facts


def smem_bytes(resources: str) -> int:
    """Shared memory of one block: scratch, and 8 bytes per barrier."""
    barriers = sum(int(number) * int(times) for number, times in _BARRIERS.findall(resources))
    return _number("smem_scratch_bytes", resources) + 8 * barriers


def _number(field: str, resources: str) -> int:
    found = re.search(rf"\b{field}=(\d+)", resources)
    if found is None:
        raise RuntimeError(f"the compiler printed no {field} in {resources!r}")
    return int(found[1])


def _count(instruction: str, ptx: str) -> int:
    return len(re.findall(rf"\b{re.escape(instruction)}\b", ptx))


@contextlib.contextmanager
def _resources_into(resources: dict[str, str]) -> Iterator[None]:
    """Keeps what lowering says of each kernel's memory, the largest where several kernels share a name.

    It goes to standard output without the name of its kernel, so that it is taken where the name is still there.
    """
    from jax.experimental.mosaic.gpu import utils

    printing = utils.dump_to_file_or_stdout

    def keep(content: str, name: str, path: str) -> Any:
        found = re.fullmatch(r"(.+)_\d+\.resources\.txt", name)
        if found is None:
            return printing(content, name, path)
        known = resources.get(found[1])
        if known is None or smem_bytes(known) < smem_bytes(content):
            resources[found[1]] = content
        return None

    utils.dump_to_file_or_stdout = keep
    try:
        yield
    finally:
        utils.dump_to_file_or_stdout = printing


@contextlib.contextmanager
def _stdout_into() -> Iterator[list[str]]:
    """Sends the file descriptor of standard output, which the compiler's own code writes to, into a list's one text."""
    printed: list[str] = []
    flush_c = ctypes.CDLL(None).fflush
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        flush_c(None)
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield printed
        finally:
            sys.stdout.flush()
            flush_c(None)
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))
