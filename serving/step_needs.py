"""What a step dispatches, as plain numbers: what the processes of an engine must agree on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillSize:
    """The programs of a prefill step."""

    rows: int = 0  # of the chunk, 0 for none
    has_tail: bool = False  # some of these rows end a prompt
    scored_rows: int = 0  # of the chunk whose log-probabilities are wanted, 0 for none


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepNeeds:
    """Programs in the order of their dispatch: those that one process's plan needs, or those that all of them run.

    Several processes run the most that any of them needs. One that needs less runs the rest on idle arguments.
    """

    loads: tuple[int, ...] = ()  # pages of each, largest first
    prefill_writes: int = 0  # entries of prefill page tables, on the rank that has most
    prefill: PrefillSize = PrefillSize()
    joins: int = 0
    tallies: int = 0
    decode_writes: int = 0  # entries of decode page tables that do not travel with the decode step
    decodes: bool = False


NOTHING = StepNeeds()
DECODE_ONLY = StepNeeds(decodes=True)
