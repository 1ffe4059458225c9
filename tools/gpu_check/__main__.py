"""`bash tools/gpu_check.sh` or `python -m widemesh.tools.gpu_check`: every GPU kernel on the GPU of this machine.

First the ceilings of the device (a copy, bf16 and FP8 matrix products), then every kernel against its reference, tiny,
ragged, empty and released shapes, then the time of every released shape with its floors. Each result is printed as it
comes, and one JSON object with all of them on the last line; `--out FILE` has the same, a JSON object per line. Takes
less than `--budget-s` in all. Exit status 0 if every kernel agrees, 1 if one does not (or crashes, hangs, or was not
reached), 2 if there is no supported GPU.

`--interpret` runs the kernels in the GPU interpreter on the tiny shapes, on any CPU, without timings.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence

from widemesh.pallas_kernels.gpu.targets import TARGETS, supported
from widemesh.tools.gpu_check.cases import MODULES
from widemesh.tools.gpu_check.report import Results
from widemesh.tools.gpu_check.supervise import WORKER, Limits, follow, run_ops

EXIT_PROBLEM, EXIT_NO_GPU = 1, 2
_CEILINGS_S, _CHECKS_UNTIL = 90, 0.6  # shares of the budget: the rest is left for timings


def main(argv: Sequence[str] | None = None, worker: Sequence[str] = WORKER) -> int:
    """The command. `worker` starts a process of `worker.py`."""
    parser = argparse.ArgumentParser(prog="python -m widemesh.tools.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="file for the results, written as they come")
    parser.add_argument("--op", action="append", choices=tuple(MODULES), help="only this op; may be given again")
    parser.add_argument("--interpret", nargs="?", const="H200", choices=tuple(TARGETS),
                        help="run in the interpreter, as if on this GPU (H200)")  # fmt: skip
    parser.add_argument("--budget-s", type=float, default=450.0, help="for everything (450)")
    parser.add_argument("--case-s", type=float, default=75.0, help="for one case, compiling included (75)")
    options = parser.parse_args(argv)
    ops = options.op or tuple(MODULES)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(options.out, "w", encoding="utf-8")) if options.out else None
        results = Results(file, interpreted=options.interpret)
        if options.interpret:
            _interpret(results, ops, options, worker)
        elif not _on_gpu(results, ops, options, worker):
            return EXIT_NO_GPU
        results.finish()
    for problem in results.problems:
        print(problem, file=sys.stderr)
    return EXIT_PROBLEM if results.problems else 0


def _interpret(results: Results, ops: Sequence[str], options: argparse.Namespace, worker: Sequence[str]) -> None:
    limits = Limits(deadline=results.begin + options.budget_s, silence_s=options.case_s)
    run_ops(ops, ("check", "--interpret", options.interpret), results.take_check, limits=limits, at_once=1,
            environment=os.environ | {"JAX_PLATFORMS": "cpu"}, worker=worker)  # fmt: skip


def _on_gpu(results: Results, ops: Sequence[str], options: argparse.Namespace, worker: Sequence[str]) -> bool:
    """False if there is no supported GPU."""
    end = results.begin + options.budget_s
    ending = None
    limits = Limits(deadline=min(results.begin + _CEILINGS_S, end), silence_s=options.case_s)
    for event in follow([*worker, "ceilings"], limits, _environment(share=0.9)):
        kind = event.pop("event")
        if kind == "device":
            results.take_device(event)
        elif kind == "result":
            results.take_ceiling(event)
        elif kind == "end":
            ending = event
    if results.device is None or results.device["target"] is None:
        found = f"jax runs on a {results.device['device']}" if results.device else f"jax did not start: {ending}"
        print(f"the kernels are written for {supported()}, and {found}; on a CPU use --interpret", file=sys.stderr)
        return False
    limits = Limits(deadline=results.begin + _CHECKS_UNTIL * options.budget_s, silence_s=options.case_s)
    run_ops(ops, ("check",), results.take_check, limits=limits, at_once=2, environment=_environment(share=0.45),
            worker=worker)  # fmt: skip
    with tempfile.NamedTemporaryFile() as turn:
        limits = Limits(deadline=end, silence_s=options.case_s)
        run_ops(ops, ("time", "--turn", turn.name), results.take_timing, limits=limits, at_once=2,
                environment=_environment(share=0.45), worker=worker)  # fmt: skip
    return True


def _environment(*, share: float) -> Mapping[str, str]:
    """Of a process that takes this share of the device's memory, of two that run at once."""
    return os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(share), "TF_CPP_MIN_LOG_LEVEL": "1"}


if __name__ == "__main__":
    sys.exit(main())
