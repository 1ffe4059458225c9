"""What every layer of one forward step needs: the rows, the static settings, and where to record intermediates.

B requests (slots) with S rows each. Rows past a request's length are padding: they compute garbage that no valid
row, no cache and no expert ever sees.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from widemesh.model.numerics import Numerics
from widemesh.model.rope import RopeTables
from widemesh.pallas_kernels.gpu import Implementation
from widemesh.pallas_kernels.route import choose_slots
from widemesh.sharding.exchange import Exchange, LocalExchange
from widemesh.sharding.tensor_parallel import TensorParallel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one step: token ids and where they stand in their sequences."""

    tokens: Int32[Array, "B S"]
    start: Int32[Array, "B"]  # position of row 0
    length: Int32[Array, "B"]  # valid rows; 0 = an idle slot
    engram_rows: Int32[Array, "B S engram_layers columns"]  # table rows, hashed from the ids
    # Of a request that continues a cached prefix, else 0.
    first: Int32[Array, "B"]  # position where its run began: no window row before it exists
    write_from: Int32[Array, "B"]  # compressed entries of tokens before it are cached already and stay as they are

    @classmethod
    def of(
        cls, tokens: Int32[Array, "B S"], start: Int32[Array, "B"], length: Int32[Array, "B"],
        engram_rows: Int32[Array, "B S engram_layers columns"],
    ) -> Rows:  # fmt: skip
        """Rows of requests that continue no cached prefix."""
        nothing = jnp.zeros(start.shape, jnp.int32)
        return cls(tokens, start, length, engram_rows, first=nothing, write_from=nothing)

    @property
    def positions(self) -> Int32[Array, "B S"]:
        """Position of every row in its sequence."""
        return self.start[:, None] + jnp.arange(self.tokens.shape[1], dtype=jnp.int32)

    @property
    def valid(self) -> Bool[Array, "B S"]:
        """Whether a row is a token rather than padding."""
        return jnp.arange(self.tokens.shape[1]) < self.length[:, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Static choices of one program."""

    numerics: Numerics
    selection: Literal["mask", "indices"]  # form in which the selected entries are handed to attention
    start_bound: int  # no request starts after this position; 0 = a fresh prefill
    exchange: Exchange = dataclasses.field(default_factory=LocalExchange)
    tp: TensorParallel = dataclasses.field(default_factory=TensorParallel)  # parts of heads, widths and vocabulary
    moe_implementation: str | None = None  # of experts held as f32
    kernels: Implementation | None = None  # of the ops under packed numerics; None: by the device

    def __post_init__(self) -> None:
        if self.numerics.packed_weights and self.selection != "indices":
            raise ValueError("selection='mask' cannot be used with packed_weights=True; use selection='indices'")
        if self.numerics.bf16_rounding and self.selection != "indices":
            raise ValueError("selection='mask' cannot be used with bf16_rounding=True; use selection='indices'")


class Recorder:
    """Collects named intermediates while a step is traced. The base class keeps nothing."""

    def record(self, name: str, value: Array) -> None:
        """Called by layers with the name of the intermediate, e.g. `layers.3.attn.input`."""


class DictRecorder(Recorder):
    """Keeps every intermediate in `values`; return that dict from the traced function to read it."""

    def __init__(self) -> None:
        self.values: dict[str, Array] = {}

    def record(self, name: str, value: Array) -> None:
        """Keep `value` under `name`."""
        self.values[name] = value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReplicaMaps:
    """Where the copies of every expert lie: arguments of a program, so that moving experts compiles nothing.

    All layers' ([L, E, C] and [L, E]), or those of one layer.
    """

    expert_slots: Int32[Array, "*L E C"]  # physical slots over all ranks, -1 past the last copy
    copies: Int32[Array, "*L E"]  # how many there are, at least 1

    def of(self, layer: int) -> ReplicaMaps:
        """Those of one layer."""
        return ReplicaMaps(self.expert_slots[layer], self.copies[layer])


@dataclasses.dataclass(frozen=True)
class StepContext:
    """Rows, tables, settings and recorder of one traced step, with a prefix for recorded names."""

    rows: Rows
    rope: RopeTables
    settings: StepSettings
    recorder: Recorder = dataclasses.field(default_factory=Recorder)
    prefix: str = ""
    replicas: ReplicaMaps | None = None  # None: slot e holds expert e
    first_row: Int32[Array, ""] | int = 0  # number over all ranks of this rank's first row

    @property
    def numerics(self) -> Numerics:
        """The step's numerics."""
        return self.settings.numerics

    def at(self, name: str) -> StepContext:
        """The same context with `name.` in front of what is recorded."""
        return dataclasses.replace(self, prefix=f"{self.prefix}{name}.")

    def layer(self, index: int) -> StepContext:
        """The context of one layer: its maps, and its name in front of what is recorded."""
        replicas = None if self.replicas is None else self.replicas.of(index)
        return dataclasses.replace(self.at(f"layers.{index}"), replicas=replicas)

    def draft_layer(self, stage: int) -> StepContext:
        """The context of one layer of the draft, whose maps `replicas` are then."""
        replicas = None if self.replicas is None else self.replicas.of(stage)
        return dataclasses.replace(self.at(f"mtp.{stage}"), replicas=replicas)

    def slots_of(self, experts: Int32[Array, "T K"]) -> Int32[Array, "T K"]:
        """Physical slots that serve this layer's rows; -1 for padding rows."""
        experts = jnp.where(self.rows.valid.reshape(-1, 1), experts, -1)
        if self.replicas is None:
            return experts
        rows = self.first_row + jnp.arange(len(experts), dtype=jnp.int32)
        positions = self.rows.positions.reshape(-1)
        return choose_slots(experts, rows, positions, self.replicas.expert_slots, self.replicas.copies)

    def record(self, name: str, value: Array) -> None:
        """Record an intermediate under the current prefix."""
        self.recorder.record(self.prefix + name, value)


def selection_form(rows: int, numerics: Numerics) -> Literal["mask", "indices"]:
    """The form of selection for a program with this many rows per request.

    Masks pay off once the rows share a dense product; the released rounding and the packed ops need indices.
    """
    needs_indices = numerics.bf16_rounding or numerics.packed_weights
    return "mask" if rows >= _MASK_FROM_ROWS and not needs_indices else "indices"


_MASK_FROM_ROWS = 16
