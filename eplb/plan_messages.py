"""What the planner's process is asked and what it answers, as bytes on a pipe: a length, then arrays as npz."""

from __future__ import annotations

import dataclasses
import io
import json
import struct
from collections.abc import Mapping
from typing import IO

import numpy as np
from jaxtyping import Int32, Num

from widemesh.eplb.config import EplbConfig
from widemesh.eplb.feasibility import Advice
from widemesh.eplb.layout import ExpertLayout
from widemesh.eplb.plan import Plan

_LENGTH = struct.Struct("<Q")
_PLAN = ("slot_owner", "before", "after", "layers", "is_skipped", "feasible")


class PlannerError(RuntimeError):
    """There is no plan. `str(err)` says why."""


def write_message(stream: IO[bytes], content: bytes) -> None:
    """Write one message, whole."""
    stream.write(_LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """The next message; None when the other side has closed the pipe, be it in the middle of one."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = stream.read(length)
    return content if len(content) == length else None


def encode_question(load: Num[np.ndarray, "L E"], current: Int32[np.ndarray, "L X"], layout: ExpertLayout,
                    config: EplbConfig) -> bytes:  # fmt: skip
    """All that a plan depends on."""
    settings = [dataclasses.asdict(layout), dataclasses.asdict(config)]
    return _pack({"load": load, "current": current, "settings": json.dumps(settings)})


def decode_question(
    content: bytes,
) -> tuple[Num[np.ndarray, "L E"], Int32[np.ndarray, "L X"], ExpertLayout, EplbConfig]:
    """What `encode_question` was given."""
    arrays = _unpack(content)
    layout, config = json.loads(str(arrays["settings"]))
    return arrays["load"], arrays["current"], ExpertLayout(**layout), EplbConfig(**config)


def encode_plan(plan: Plan) -> bytes:
    """A plan as an answer."""
    return _pack({**{name: getattr(plan, name) for name in _PLAN}, **dataclasses.asdict(plan.advice)})


def encode_failure(reason: str) -> bytes:
    """An answer without a plan."""
    return _pack({"failure": reason})


def decode_answer(content: bytes) -> Plan:
    """The plan. Raises PlannerError with the reason if there is none."""
    arrays = _unpack(content)
    if "failure" in arrays:
        raise PlannerError(str(arrays["failure"]))
    return Plan(
        slot_owner=arrays["slot_owner"], layers=arrays["layers"], is_skipped=bool(arrays["is_skipped"]),
        before=float(arrays["before"]), after=float(arrays["after"]), feasible=float(arrays["feasible"]),
        advice=Advice(num_redundant_experts=int(arrays["num_redundant_experts"]), bound=float(arrays["bound"]),
                      planned=float(arrays["planned"])),
    )  # fmt: skip


def _pack(arrays: Mapping[str, object]) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **{name: np.asarray(value) for name, value in arrays.items()})
    return stream.getvalue()


def _unpack(content: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)
