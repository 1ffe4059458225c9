"""Tokens that each physical expert slot was sent, counted on the device: of the last step, and of a window of steps.

R ranks (1 in a rank's own part), W rows of the ring, L layers, Q slots of a rank.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from widemesh.eplb.window import FIRST_ROW, NOT_RECORDED
from widemesh.model.step import Recorder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertLoad:
    """Counts of (row, expert) pairs; padding rows are none."""

    ring: Int32[Array, "R W L Q"]
    num_rows: Int32[Array, "R"]  # of the ring that belong to this window, from the first on
    last: Int32[Array, "R L Q"]  # of the newest step

    @staticmethod
    def zeros(ranks: int, window: int, layers: int, held: int) -> ExpertLoad:
        """Nothing counted. A window of 0 has a ring of one row, which no step writes."""
        return ExpertLoad(
            ring=jnp.zeros((ranks, max(1, window), layers, held), jnp.int32),
            num_rows=jnp.zeros(ranks, jnp.int32),
            last=jnp.zeros((ranks, layers, held), jnp.int32),
        )

    def after(self, load: Int32[Array, "L Q"], record: Int32[Array, ""]) -> ExpertLoad:
        """With one more step, on one rank. A full ring keeps its rows. `record`: a code of `eplb.window`."""
        row = jnp.where(record == FIRST_ROW, 0, self.num_rows[0])
        size = self.ring.shape[1]
        place = jnp.where(record == NOT_RECORDED, size, row)  # past the end = dropped
        return ExpertLoad(
            ring=self.ring.at[0, place].set(load, mode="drop"),
            num_rows=jnp.where(record == NOT_RECORDED, self.num_rows, jnp.minimum(row + 1, size)),
            last=load[None],
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoadSummary:
    """What the host reads: of a window, or of one step."""

    slots: Int32[Array, "L X"]  # sum over the steps
    # Over steps and layers, the mean and the maximum rank load; their ratio is the balancedness.
    mean: Array
    busiest: Array

    @staticmethod
    def of(ring: Int32[Array, "R W L Q"], num_rows: Int32[Array, ""] | int) -> LoadSummary:
        """Of the first rows of all ranks' rings."""
        counted = jnp.where((jnp.arange(ring.shape[1]) < num_rows)[:, None, None], ring, 0)
        by_rank = jnp.sum(counted, axis=-1)  # [R, W, L]
        slots = jnp.moveaxis(jnp.sum(counted, axis=1), 0, 1)
        return LoadSummary(
            slots=slots.reshape(len(slots), -1),
            mean=jnp.sum(jnp.mean(by_rank.astype(jnp.float32), axis=0)),
            busiest=jnp.sum(jnp.max(by_rank, axis=0).astype(jnp.float32)),
        )


class LoadRecorder(Recorder):
    """Collects the expert load of every layer of a traced step."""

    def __init__(self) -> None:
        self._layers: list[Int32[Array, "Q"]] = []

    def record(self, name: str, value: Array) -> None:
        """Keep a layer's load."""
        if name.endswith(".ffn.load"):
            self._layers.append(value)

    def load(self) -> Int32[Array, "L Q"]:
        """Of all layers, in their order."""
        return jnp.stack(self._layers)
