"""What a decode step knows of every slot beside its cache. It stays on the device, so steps follow each other there.

The host writes a slot when a request joins it and reads tokens one step late; what happens in between is decided
here: a slot that has drawn a stop token or its last token runs no more rows, however many steps are in flight.
B slots of a rank, D drafts.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from widemesh.serving.limits import MAX_STOP_IDS
from widemesh.serving.sampling.rows import NO_ID


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """One row per slot."""

    token: Int32[Array, "B"]  # the newest one, whose row runs next
    position: Int32[Array, "B"]  # of that token
    tail: Int32[Array, "B h"]  # ids before it, oldest first, -1 before the start
    last: Int32[Array, "B"]  # position of the last token that may be drawn
    stops: Int32[Array, "B stops"]  # ids that end the request; NO_ID = none
    is_done: Bool[Array, "B"]
    drafts: Int32[Array, "B D"]  # what may follow the newest token; -1 = none, and none behind it

    @staticmethod
    def idle(slots: int, history_len: int, drafts: int = 0) -> DecodeState:
        """Host arrays of slots that nobody has."""
        zeros = np.zeros(slots, np.int32)
        return DecodeState(
            token=zeros,  # type: ignore[arg-type]
            position=zeros,  # type: ignore[arg-type]
            tail=np.full((slots, history_len), -1, np.int32),  # type: ignore[arg-type]
            last=zeros,  # type: ignore[arg-type]
            stops=np.full((slots, MAX_STOP_IDS), NO_ID, np.int32),  # type: ignore[arg-type]
            is_done=np.ones(slots, bool),  # type: ignore[arg-type]
            drafts=np.full((slots, drafts), -1, np.int32),  # type: ignore[arg-type]
        )

    def join(self, slot: Int32[Array, "1"], row: Int32[Array, "1 width"]) -> DecodeState:
        """Write one slot from a packed row (`JoinRow`); a slot of -1 writes nothing."""
        place = jnp.where(slot < 0, self.token.shape[0], slot)  # past the end = dropped
        h = self.tail.shape[1]

        def put(old: Array, new: Array | int) -> Array:
            return old.at[place].set(new, mode="drop")

        return DecodeState(
            token=put(self.token, row[:, 0]),
            position=put(self.position, row[:, 1]),
            last=put(self.last, row[:, 2]),
            tail=put(self.tail, row[:, 3 : 3 + h]),
            stops=put(self.stops, row[:, 3 + h :]),
            is_done=put(self.is_done, row[:, 1] >= row[:, 2]),
            drafts=put(self.drafts, -1),  # the first step is without
        )

    def advance(self, drawn: Int32[Array, "B"], runs: Bool[Array, "B"]) -> DecodeState:
        """After a row of the slots in `runs`, which drew these tokens."""
        tail = jnp.concatenate([self.tail, self.token[:, None]], axis=1)[:, 1:]
        position = self.position + runs
        ends = jnp.any(self.stops == drawn[:, None], axis=1) | (position >= self.last)
        return dataclasses.replace(
            self,
            token=jnp.where(runs, drawn, self.token),
            position=position,
            tail=jnp.where(runs[:, None], tail, self.tail),
            is_done=self.is_done | (runs & ends),
        )

    def with_drafts(self, drafts: Int32[Array, "B D"], are_new: Bool[Array, "B"]) -> DecodeState:
        """With these drafts in the slots that have new ones."""
        return dataclasses.replace(self, drafts=jnp.where(are_new[:, None], drafts, self.drafts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinRow:
    """A slot's state as a request joins it."""

    token: int
    position: int
    last: int
    tail: Int32[np.ndarray, "h"]
    stop_token_ids: frozenset[int]

    def packed(self) -> Int32[np.ndarray, "width"]:
        """One array, as `DecodeState.join` reads it."""
        stops = np.full(MAX_STOP_IDS, NO_ID, np.int32)
        ids = sorted(self.stop_token_ids)
        stops[: len(ids)] = ids
        return np.concatenate([np.array([self.token, self.position, self.last], np.int32), self.tail, stops])
