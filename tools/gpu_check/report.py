"""Records as they come: a line on standard output and one in a file each, floors added, and the summary."""

from __future__ import annotations

import json
import time
from typing import IO, Any


class Results:
    """What was found so far. Every record goes to the file at once, as a line."""

    def __init__(self, file: IO[str] | None, *, interpreted: str | None) -> None:
        self.begin = time.monotonic()
        self.file, self.interpreted = file, interpreted
        self.device: dict[str, Any] | None = None
        self.ceilings: dict[str, float | None] = {}
        self.checks: list[dict[str, Any]] = []
        self.timings: list[dict[str, Any]] = []

    def take_device(self, record: dict[str, Any]) -> None:
        """The device and the version of jax."""
        self.device = record
        self._write("device", record, f"{record['device']} (compute capability {record['compute_capability'] or '-'}), "
                                      f"jax {record['jax']}")  # fmt: skip

    def take_ceiling(self, record: dict[str, Any]) -> None:
        """One ceiling: {"ceiling": name, "per_second": rate or None, "why": reason}."""
        self.ceilings[record["ceiling"]] = record["per_second"]
        rate = f"{record['per_second']:.4g} / s" if record["per_second"] else f"none ({record.get('why', '')})"
        self._write("ceiling", record, f"{record['ceiling']}: {rate}")

    def take_check(self, record: dict[str, Any]) -> None:
        """One comparison with a reference."""
        self.checks.append(record)
        error = f"error {record['error']:.3g}, at most {record['tolerance']:.3g}" if _is_number(record, "error") else ""
        self._write("check", record, f"check {_name(record)}: {record['status']} {error or record.get('message', '')}")

    def take_timing(self, record: dict[str, Any]) -> None:
        """One measurement; floors and ratio are added to it."""
        record = record | floors(record, self.ceilings)
        self.timings.append(record)
        said = record.get("message", "")
        if record["status"] == "ok":
            said = f"{record['microseconds']:.1f} us ({record['low']:.1f} .. {record['high']:.1f})"
            if record["ratio"]:
                floor = f"{record['floor_microseconds']:.1f} us by {record['bound']}"
                said += f", floor {floor}, ratio {record['ratio']:.2f}"
        self._write("time", record, f"time {_name(record)}: {record['status']} {said}")

    @property
    def problems(self) -> list[str]:
        """One sentence each. A timing that was skipped for want of time is none; a check that was is one."""
        wrong = [("check", record) for record in self.checks if record["status"] != "ok"]
        wrong += [("time", record) for record in self.timings if record["status"] not in ("ok", "skipped")]
        return [f"{stage} {_name(record)}: {record['status']}" + _reason(record) for stage, record in wrong]

    def finish(self) -> dict[str, Any]:
        """Everything, as one object; also the last line of the file."""
        summary = {
            "device": self.device,
            "interpreted": self.interpreted,
            "ceilings": self.ceilings,
            "checks": self.checks,
            "timings": self.timings,
            "problems": self.problems,
            "seconds": round(time.monotonic() - self.begin, 1),
        }
        line = json.dumps(summary)
        if self.file:
            print(line, file=self.file, flush=True)
        print(line, flush=True)
        return summary

    def _write(self, kind: str, record: dict[str, Any], text: str) -> None:
        print(text.rstrip(), flush=True)
        if self.file:
            print(json.dumps({"record": kind, **record}), file=self.file, flush=True)


def floors(record: dict[str, Any], ceilings: dict[str, float | None]) -> dict[str, Any]:
    """Microseconds that the bytes and the FLOP of a timing need at the measured ceilings, and time over the larger.

    FLOP count at the rate of bf16 products, also where a kernel uses none: a lower bound either way. None where a
    ceiling is missing.
    """
    if record["status"] != "ok":
        return {}
    times = {
        bound: record[f"floor_{bound}"] / rate * 1e6
        for bound, rate in (("bytes", ceilings.get("copy_bytes")), ("flops", ceilings.get("bf16_flops")))
        if rate
    }
    whole = max(times.values()) if len(times) == 2 else None
    return {
        "bytes_microseconds": times.get("bytes"),
        "flops_microseconds": times.get("flops"),
        "floor_microseconds": whole,
        "bound": max(times, key=lambda bound: times[bound]) if whole else None,
        "ratio": record["microseconds"] / whole if whole else None,
    }


def _name(record: dict[str, Any]) -> str:
    return f"{record['op']}/{record['case']}"


def _reason(record: dict[str, Any]) -> str:
    if record["status"] == "wrong":
        wrong = [output for output in record["outputs"] if not output["ok"]]
        return "".join(f", {output['name']} off by {output['error']} (worst row {output['worst_row']})"
                       for output in wrong)  # fmt: skip
    return f", {record['message']}" if record.get("message") else ""


def _is_number(record: dict[str, Any], name: str) -> bool:
    return isinstance(record.get(name), (int, float))
