"""Compiling for a GPU that is not there, and the check of all kernels:

    python -m widemesh.pallas_kernels.gpu.aot H200 [--op OP ...]

prints progress on standard error and one JSON object on standard output: for each case its kernels with registers,
spills, shared memory, architecture and instructions, and the problems found. Exit status 1 if there is any problem.

One process compiles for one architecture only, for targets of that architecture one after the other: what they share
is compiled once. `processes.py` starts one process per architecture.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from widemesh.pallas_kernels.gpu.aot_case import AotCase
from widemesh.pallas_kernels.gpu.cases import find_cases
from widemesh.pallas_kernels.gpu.facts import Compiled, KernelFacts, MemoryUse
from widemesh.pallas_kernels.gpu.hlo import Program
from widemesh.pallas_kernels.gpu.ptx import recorded
from widemesh.pallas_kernels.gpu.targets import TARGETS
from widemesh.pallas_kernels.gpu.toolchain import ToolchainError, prepare
from widemesh.pallas_kernels.gpu.topology import topology

# The compiler reports on a kernel once per process. By architecture and the hash of the kernel in the program.
_known: dict[tuple[str, str], KernelFacts] = {}

# Programs of cases, by their text. All are of the process's one architecture, on one device.
_programs: dict[str, Compiled] = {}


def compile_ahead(
    function: Callable[..., Any], args: tuple[Any, ...], target: str, kwargs: Mapping[str, Any] | None = None
) -> Compiled:
    """Compiles a function for a target that need not be there, as a jitted call with these arguments would.

    `function` is jitted unless it is already. `args` and `kwargs` are trees with `jax.ShapeDtypeStruct` for arrays;
    shardings must be over devices of `topology(target, n)`, and an array without one lies on `topology(target)[0]`.
    The kernels are taken: the target's device is the default one meanwhile. Standard output is the compiler's
    meanwhile (see `recorded`).

    Raises what tracing, lowering and compiling raise; RuntimeError for a kernel that the compiler did not report on,
    because it came from jax's compilation cache; and what `topology` raises. Nothing checks that memory fits.
    """
    begin = time.perf_counter()
    device, traced = _traced(function, args, target, kwargs or {})
    return dataclasses.replace(_compiled(traced, device, target), seconds=time.perf_counter() - begin)


def _traced(
    function: Callable[..., Any], args: tuple[Any, ...], target: str, kwargs: Mapping[str, Any]
) -> tuple[jax.Device, Any]:
    """A device of the program, and the program traced with that device as the default one."""
    placed, placed_kwargs = jax.tree.map(lambda leaf: _placed(leaf, target), (args, dict(kwargs)), is_leaf=_is_shape)
    device = _first_device((placed, placed_kwargs), target)
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    with jax.default_device(device):
        return device, jitted.trace(*placed, **placed_kwargs)


def _compiled(traced: Any, device: jax.Device, target: str) -> Compiled:
    """The rest of `compile_ahead`."""
    begin = time.perf_counter()
    with jax.default_device(device), recorded() as facts:
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    seconds = time.perf_counter() - begin
    text = compiled.as_text()
    program = Program(text)
    memory = compiled.memory_analysis()
    return Compiled(
        target=target,
        seconds=seconds,
        kernels=_attributed(program.kernel_hashes(), facts, target),
        calls=program.calls(),
        collectives=program.collectives(),
        memory=MemoryUse(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            host_argument_bytes=memory.host_argument_size_in_bytes,
            host_temp_bytes=memory.host_temp_size_in_bytes,
        ),
        hlo=text,
    )


def problems(case: AotCase, compiled: Compiled) -> list[str]:
    """What is wrong with the kernels of a case, one sentence each; nothing if all is well."""
    target = TARGETS[compiled.target]
    found = [] if compiled.kernels else ["the program calls no Mosaic kernel: the reference was compiled"]
    for kernel in compiled.kernels:
        if not kernel.name.startswith(case.op):
            found.append(f"kernel_name={kernel.name!r} must begin with the op's name {case.op!r}")
        if kernel.arch != target.arch:
            found.append(f"{kernel.name} is compiled for {kernel.arch} instead of {target.arch}")
        if kernel.spill_bytes:
            found.append(f"{kernel.name} spills {kernel.spill_bytes} bytes of registers")
        if kernel.smem_bytes > target.smem_bytes:
            found.append(f"{kernel.name} takes {kernel.smem_bytes} bytes of shared memory of {target.smem_bytes}")
    instruction = case.instruction(target.arch)
    if instruction and not any(kernel.instructions.get(instruction) for kernel in compiled.kernels):
        found.append(f"no kernel has the instruction {instruction}")
    return list(dict.fromkeys(found))  # kernels of one name may have the same problem


def compile_cases(cases: Iterable[AotCase], target: str) -> list[dict[str, Any]]:
    """One JSON object per case of the target: the case, its kernels, its problems. An error is a problem.

    A program that this process has compiled already for another target of the architecture is not compiled again.
    """
    results = []
    for case in cases:
        if target not in case.targets:
            continue
        begin = time.perf_counter()
        kernels: tuple[KernelFacts, ...] = ()
        try:
            device, traced = _traced(case.function, case.args, target, {})
            program = str(traced.jaxpr)
            if program not in _programs:
                _programs[program] = _compiled(traced, device, target)
            compiled = dataclasses.replace(_programs[program], target=target)
        except Exception as error:  # whatever a kernel's trace or the compiler raises belongs to this case alone
            first = next(iter(str(error).strip().splitlines()), "")
            found = [f"{type(error).__name__}: {first}"]
        else:
            kernels, found = compiled.kernels, problems(case, compiled)
        result = {
            "op": case.op,
            "case": case.name,
            "shape": case.shape,
            "target": target,
            "seconds": round(time.perf_counter() - begin, 2),
            "kernels": [dataclasses.asdict(kernel) for kernel in kernels],
            "instruction": case.instruction(TARGETS[target].arch),
            "floor_bytes": case.floor_bytes,
            "floor_flops": case.floor_flops,
            "moved_bytes": case.moved_bytes,
            "problems": found,
        }
        verdict = "; ".join(found) or "ok"
        print(f"{target} {case.op} {case.name}: {result['seconds']} s, {verdict}", file=sys.stderr, flush=True)
        results.append(result)
    return results


def main(argv: list[str] | None = None) -> int:
    """The command of this module."""
    parser = argparse.ArgumentParser(description="Compile all kernels for a GPU that need not be there.")
    parser.add_argument("targets", nargs="+", choices=tuple(TARGETS), help="of one architecture")
    parser.add_argument("--op", action="append", help="only this op, or one case of it as OP/CASE; may be given again")
    options = parser.parse_args(argv)
    try:
        tools = prepare()
        cases, broken = find_cases(options.op)
        for target in options.targets:
            topology(target)  # refuses a second architecture
    except (ToolchainError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    results = [result for target in options.targets for result in compile_cases(cases, target)]
    report = {
        "targets": options.targets,
        "jax": jax.__version__,
        "ptxas": tools.ptxas,
        "ptxas_version": tools.ptxas_version,
        "cases": results,
        "broken": broken,
    }
    print(json.dumps(report))
    return 1 if broken or any(result["problems"] for result in results) else 0


def _attributed(hashes: Mapping[str, list[str]], facts: list[KernelFacts], target: str) -> tuple[KernelFacts, ...]:
    """The facts of each distinct kernel of a program, from this compilation's reports or earlier ones."""
    reported: dict[str, list[KernelFacts]] = {}
    for fact in facts:
        reported.setdefault(fact.name, []).append(fact)
    kernels = []
    for name, of_name in hashes.items():
        for kernel_hash in of_name:
            key = (TARGETS[target].arch, kernel_hash)
            if key not in _known:
                if not reported.get(name):
                    raise RuntimeError(
                        f"the compiler did not report on kernel {name!r}; set JAX_ENABLE_COMPILATION_CACHE=false"
                    )
                _known[key] = reported[name].pop(0)
            kernels.append(_known[key])
    return tuple(kernels)


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _placed(leaf: Any, target: str) -> Any:
    """An array that lies nowhere lies on the first device; everything else is as it is."""
    if not _is_shape(leaf) or leaf.sharding is not None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(topology(target)[0]))


def _first_device(tree: Any, target: str) -> jax.Device:
    """A device of the program: the one with the lowest id of any argument."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(tree, is_leaf=_is_shape) if _is_shape(leaf)]
    devices = [device for sharding in shardings for device in sharding.device_set]
    return min(devices, key=lambda device: device.id) if devices else topology(target)[0]


if __name__ == "__main__":
    sys.exit(main())
