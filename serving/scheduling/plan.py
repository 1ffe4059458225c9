"""What one step does, as arrays that the device takes. Every array is new and never written again."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Int32, Int64

from widemesh.serving.scheduling.request import ScheduledRequest


@dataclasses.dataclass(frozen=True)
class PageWrites:
    """New entries of a mesh's page tables: table[slots[i], places[i]] = pages[i]. No entry is named twice.

    Entries past a slot's last page keep old ids; a slot that is not active must not write through its row.
    """

    slots: Int32[np.ndarray, "n"]  # over all ranks of the mesh; the rank is slot // slots per rank
    places: Int32[np.ndarray, "n"]  # page of the sequence: position // page_size
    pages: Int32[np.ndarray, "n"]  # of the pool of the slot's rank

    def __len__(self) -> int:
        return len(self.slots)

    @classmethod
    def of(cls, slot: int, first: int, pages: Int32[np.ndarray, "n"]) -> PageWrites:
        """Entries of one slot from place `first` on."""
        places = np.arange(first, first + len(pages), dtype=np.int32)
        return cls(np.full(len(pages), slot, np.int32), places, pages)

    @classmethod
    def join(cls, parts: list[PageWrites]) -> PageWrites:
        """All entries together."""
        if not parts:
            return NO_WRITES
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((p.slots, p.places, p.pages) for p in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))


NO_WRITES = PageWrites(*[np.zeros(0, np.int32)] * 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvLoad[RequestT: ScheduledRequest]:
    """A prefilled request's way to its decode slot: pages pool to pool, and the rings from slot to slot."""

    request: RequestT
    prefill_rank: int
    prefill_slot: int  # over all ranks
    decode_rank: int
    decode_slot: int  # over all ranks
    tokens: int  # whose state is moved
    source_pages: Int32[np.ndarray, "n"]  # of the prefill rank's pool; shared ones among them
    target_pages: Int32[np.ndarray, "n"]  # of the decode rank's pool, in the same order


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPlan[RequestT: ScheduledRequest]:
    """One chunk of each of c requests, by rank, on a rank in the order in which they get its rows.

    Chunk i runs `requests[i].tokens[start[i] : start[i] + length[i]]`.
    """

    requests: tuple[RequestT, ...]
    epochs: tuple[int, ...]
    slots: Int32[np.ndarray, "c"]  # over all ranks
    ranks: Int32[np.ndarray, "c"]
    start: Int32[np.ndarray, "c"]  # first token of the chunk
    length: Int32[np.ndarray, "c"]  # rows, at least 1
    window_start: Int32[np.ndarray, "c"]  # first token the request ran: older rows of the slot's rings are not its own
    write_from: Int32[np.ndarray, "c"]  # rows of tokens below it are not written to pages: others read those
    is_last: Bool[np.ndarray, "c"]  # ends the prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """One step of the decode slots, by slot.

    With drafts, a slot may have reached its request's limit on the device before the host knows. The device runs no
    more rows for it then: they would lie past its pages.
    """

    is_active: Bool[np.ndarray, "slots"]
    epochs: Int64[np.ndarray, "slots"]
    generation: int  # changes when a request comes into a slot, joins or leaves
    is_everybody: bool  # who decodes in this generation
    one_each: bytes  # of int32 counts that give each active slot one token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accepted:
    """What a decode step has added, by slot. Requests that have left their slot since its plan are not in it."""

    is_live: Bool[np.ndarray, "slots"]  # of the requests that ran and still are where they were
    tokens: Int32[np.ndarray, "slots rows"]
    counts: Int64[np.ndarray, "slots"]  # tokens that were accepted, the first of the row; 0 where not live
    outputs_then: Int64[np.ndarray, "slots"]  # tokens of output that each live request had ...
    steps_since: int = 0  # ... so many steps of one token each ago, this one included
    is_at_limit: Bool[np.ndarray, "slots"]  # they are as many as it may have
    is_plain: bool = False  # everybody who decodes was in the step, has got one token and may have more

    @property
    def outputs(self) -> Int64[np.ndarray, "slots"]:
        """Tokens of output that each live request has now."""
        return self.outputs_then + self.steps_since


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan[RequestT: ScheduledRequest]:
    """To be dispatched in this order: loads, prefill (its page writes first), decode (its page writes first).

    The order lets a slot or a page change hands within a step: a load reads before its pages' next owner writes.
    """

    loads: tuple[KvLoad[RequestT], ...] = ()
    joined: tuple[RequestT, ...] = ()  # decode from this step on, loaded or without need of it
    admitted: tuple[RequestT, ...] = ()
    preempted: tuple[RequestT, ...] = ()
    prefill_pages: PageWrites = NO_WRITES
    prefill: PrefillPlan[RequestT] | None = None
    decode_pages: PageWrites = NO_WRITES
    decode: DecodePlan | None

    @property
    def moves_pages(self) -> bool:
        """Whether pages have been given out, taken or read."""
        return bool(self.loads or self.admitted or self.preempted or len(self.decode_pages))

    @property
    def is_empty(self) -> bool:
        """Nothing to dispatch: wait for a result or a request."""
        return not self.loads and self.prefill is None and self.decode is None
