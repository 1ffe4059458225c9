"""A plan made ready for its dispatch, while the processes of the engine agree on the step."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int32, UInt32

from widemesh.serving.device import DeviceEngine, PrefillRow
from widemesh.serving.engine_request import Request
from widemesh.serving.sampling import TallyRow
from widemesh.serving.scheduling import KvLoad, PrefillPlan, StepPlan
from widemesh.serving.step_needs import DECODE_ONLY, NOTHING, PrefillSize, StepNeeds


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeWork:
    """Arguments of a decode step beside those that are on the devices."""

    rows: Int32[np.ndarray, "slots"] | None = None  # at most, of every slot; None: this process has no work in it
    mask: UInt32[np.ndarray, "slots W"] | None = None
    tallies: tuple[TallyRow, ...] = ()  # to be written before it


IDLE = DecodeWork()  # no slot of this process has work


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one process does in a step, in the order of the dispatch."""

    needs: StepNeeds
    loads: tuple[KvLoad[Request], ...] = ()  # the largest first
    prefill: list[PrefillRow | None]  # by rank
    joins: tuple[Request, ...] = ()
    decode: DecodeWork = IDLE


NO_WORK = StepWork(needs=NOTHING, prefill=[])


def make_work(plan: StepPlan[Request], decode: DecodeWork, device: DeviceEngine) -> StepWork:
    """Everything but the decode step's arguments from a plan."""
    nobody: list[PrefillRow | None] = [None] * device.prefill.ranks
    is_decoding = plan.decode is not None
    if plan.prefill is None and not (plan.moves_pages or plan.joined or decode.tallies):
        return StepWork(needs=DECODE_ONLY if is_decoding else NOTHING, prefill=nobody, decode=decode)
    loads = sorted(plan.loads, key=lambda load: -len(load.source_pages))
    joins = tuple(request for request in plan.joined if request.decode_slot >= 0)
    prefill = nobody if plan.prefill is None else _prefill_rows(plan.prefill, device)
    needs = StepNeeds(
        loads=tuple(device.load_size(load) for load in loads),
        prefill_writes=device.prefill.most_writes(plan.prefill_pages),
        prefill=PrefillSize() if plan.prefill is None else device.prefill_size(prefill),
        joins=len(joins),
        tallies=len(decode.tallies),
        decode_writes=device.separate_writes(plan.decode_pages, is_decoding=is_decoding),
        decodes=is_decoding,
    )
    return StepWork(needs=needs, loads=tuple(loads), prefill=prefill, joins=joins, decode=decode)


def _prefill_rows(plan: PrefillPlan[Request], device: DeviceEngine) -> list[PrefillRow | None]:
    work: list[PrefillRow | None] = [None] * device.prefill.ranks
    history_len = device.engram_hash.history_len
    for i, request in enumerate(plan.requests):
        start, length = int(plan.start[i]), int(plan.length[i])
        work[int(plan.ranks[i])] = PrefillRow(
            request.tokens[start : start + length],
            start,
            request.recent(start, history_len),
            first=int(plan.window_start[i]),
            write_from=int(plan.write_from[i]),
            is_last=bool(plan.is_last[i]),
            targets=None if request.prompt_scores is None else request.tokens[start + 1 : start + length + 1],
        )
    return work
