"""A process that checks or times the cases of one op, or measures the ceilings, and prints one JSON object per line.

    {"event": "cases", "names": [...]}    first: what will run
    {"event": "waiting"}                  another process has its turn on the device
    {"event": "begin", "case": "decode"}
    {"event": "result", "case": "decode", "status": "ok", ...}

Exit status 3 asks to be started again for the cases that are left: the device gave an error, after which a process
may not be able to use it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from widemesh.pallas_kernels.gpu import device_target, interpreted
from widemesh.tools.gpu_check import ceilings
from widemesh.tools.gpu_check.case import Case, Outcome
from widemesh.tools.gpu_check.cases import load
from widemesh.tools.gpu_check.supervise import START_AGAIN
from widemesh.tools.gpu_check.timing import Timed

_WAIT_S = 2.0


def main(argv: Sequence[str] | None = None, load_cases: Callable[[str], Sequence[Case]] = load) -> int:
    """The process. `load_cases(op)` gives the cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=("ceilings", "check", "time"))
    parser.add_argument("--op")
    parser.add_argument("--interpret")
    parser.add_argument("--turn", help="file that is locked while the device must be free of others")
    parser.add_argument("--done", action="append", default=[])
    options = parser.parse_args(argv)
    if options.stage == "ceilings":
        _ceilings()
        return 0
    cases = [case for case in load_cases(options.op) if _belongs(case, options) and case.name not in options.done]
    _say(event="cases", names=[case.name for case in cases])
    for case in cases:
        begin = time.perf_counter()
        try:
            work = _time if options.stage == "time" else _check
            result = work(case, options)
            is_usable = True
        except Exception as error:
            is_usable = not isinstance(error, jax.errors.JaxRuntimeError)
            result = {"status": "raised", "message": f"{type(error).__name__}: {error}"[:500]}
        _say(event="result", case=case.name, **result, seconds=round(time.perf_counter() - begin, 2))
        if not is_usable:
            return START_AGAIN
    return 0


def _belongs(case: Case, options: argparse.Namespace) -> bool:
    if options.stage == "time":
        return case.floor is not None
    return case.is_tiny or not options.interpret


def _check(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    _say(event="begin", case=case.name)
    args = jax.block_until_ready(jax.jit(case.build)(_key(case)))
    with jax.default_matmul_precision("highest"):  # else f32 products of the reference may have 11 bits
        # Waited for: an error belongs to what raised it, and the interpreter may stop for good beside other programs.
        wanted = jax.block_until_ready(jax.jit(functools.partial(case.call, "reference"))(*args))
    with interpreted(options.interpret) if options.interpret else contextlib.nullcontext():
        found = jax.block_until_ready(jax.jit(functools.partial(case.call, "mosaic"))(*args))
    outcomes = case.compare(args, found, wanted)
    worst = max(outcomes, key=lambda outcome: _share(outcome.error, outcome.tolerance))
    return {
        "status": "ok" if all(outcome.is_ok for outcome in outcomes) else "wrong",
        "error": worst.error,
        "tolerance": worst.tolerance,
        "outputs": [_plain(outcome) for outcome in outcomes],
    }


def _share(error: float, tolerance: float) -> float:
    """Of its tolerance; more than everything where that is 0 or the error is NaN."""
    if error == 0:
        return 0.0
    return error / tolerance if tolerance and not math.isnan(error) else math.inf


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.name, "ok": outcome.is_ok, "error": outcome.error, "tolerance": outcome.tolerance,
        "worst_row": outcome.worst, "worst_row_tolerance": outcome.worst_tolerance,
    }  # fmt: skip


def _time(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    assert case.floor is not None, "chosen by _belongs"
    _say(event="begin", case=case.name)
    timed = Timed(case, _key(case))
    with _turn(options.turn):
        _say(event="begin", case=case.name)
        measured = timed.measure()
    return {"status": "ok", "shape": case.floor.shape, **measured, "floor_bytes": case.floor.floor_bytes,
            "floor_flops": case.floor.floor_flops}  # fmt: skip


def _ceilings() -> None:
    device, target = jax.devices()[0], device_target()
    _say(event="device", device=device.device_kind, platform=device.platform,
         compute_capability=str(getattr(device, "compute_capability", "")), target=target.name if target else None,
         jax=jax.__version__)  # fmt: skip
    if target:
        for record in ceilings.measure():
            _say(event="result", **record)


def _key(case: Case) -> jax.Array:
    """Another one for every case, the same in every run."""
    return jnp.uint32(zlib.crc32(f"{case.op}/{case.name}".encode()))


@contextlib.contextmanager
def _turn(path: str | None) -> Iterator[None]:
    """Holds the lock; it falls with the process that holds it, however that ends."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _say(event="waiting")
                time.sleep(_WAIT_S)
        yield


def _say(**record: Any) -> None:
    print(json.dumps(_finite(record)), flush=True)


def _finite(x: Any) -> Any:
    """JSON has no NaN and no infinity: their names instead."""
    if isinstance(x, dict):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, list):
        return [_finite(value) for value in x]
    return repr(x) if isinstance(x, float) and not math.isfinite(x) else x


if __name__ == "__main__":
    sys.exit(main())
