"""Bytes that the exchanges of a mesh send, added up step by step from their closed forms."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from widemesh.serving.expert_models import DRAFT, TARGET
from widemesh.serving.programs import Programs
from widemesh.sharding import EP_AXIS, TP_AXIS
from widemesh.sharding.exchange import exchange_traffic, look_up_traffic

# The experts of the last layer matter to logits only, and the compiler drops them from programs that make none.
Part = Literal["logits", "prefill", "encode", "tail", "draft"]  # of the model's layers, that a program runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What one run of a program sends: so much whatever it is given, and so much for each of its valid rows."""

    fixed: float
    per_row: float


class MeshTraffic:
    """Bytes sent between the ranks of one mesh since the start, by the devices of this process.

    The gathering exchange sends a fixed number per run; of the ragged one the expectation is counted, all experts being
    equally likely. Lookups of Engram rows are included.
    """

    def __init__(self, programs: Programs):
        self.total = 0
        self._programs = programs
        self._known: dict[tuple[Part, int], StepBytes] = {}

    def add(self, part: Part, rows: int, valid: int) -> None:
        """A program of `rows` rows per rank has run, with `valid` rows on this process's ranks."""
        self.total += self.step(part, rows, valid)

    def step(self, part: Part, rows: int, valid: int, times: int = 1) -> int:
        """What `add` would add for a program that runs its layers `times` times, with `valid` rows in all."""
        one = self._known.get((part, rows))
        if one is None:
            one = self._known[part, rows] = self._step_bytes(part, rows)
        return round(one.fixed * times + one.per_row * valid)

    def _step_bytes(self, part: Part, rows: int) -> StepBytes:
        programs, model = self._programs, self._programs.config
        ranks, tp = (programs.mesh.shape[axis] for axis in (EP_AXIS, TP_AXIS))
        devices = len(programs.mesh.local_devices)
        cut, depth = model.replay_cut, model.num_hidden_layers
        layers = {"logits": depth, "prefill": depth - 1, "encode": cut, "tail": depth - 1 - cut,
                  "draft": len(model.draft_roles)}[part]  # fmt: skip
        tables = 0 if part in ("tail", "draft") else len(model.engram_layer_ids)
        of = DRAFT if part == "draft" else TARGET
        shape, form = programs.exchange_shape(rows, of), programs.exchange_form(rows, of)
        empty, single = (exchange_traffic(form, dataclasses.replace(shape, rows=count)).total for count in (0, 1))
        fixed = empty if form == "ragged" else exchange_traffic(form, shape).total
        per_row = single - empty if form == "ragged" else 0.0
        value_bytes = jnp.dtype(programs.numerics.compute_dtype).itemsize
        look_up = look_up_traffic(rows=rows, columns=model.num_engram_columns, width=model.engram_head_dim // tp,
                                  value_bytes=value_bytes, ranks=ranks)  # fmt: skip
        return StepBytes(fixed=devices * (layers * fixed + tables * look_up), per_row=tp * layers * per_row)
