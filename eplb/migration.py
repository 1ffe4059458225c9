"""From one placement to the next: which rows of expert weights go where, and in which slices.

A layer moves through a staging area as large as the rows that its ranks hold. Slices copy rows of other ranks into
it; the live rows are only read. When all rows of a layer are staged, one commit makes each live row what it must be,
together with the layer's map. So whatever has been done so far, every layer is served by a whole placement: its old one
before its commit, its next one after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32

from widemesh.eplb.layout import ExpertLayout


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TransferSlice:
    """Rows that ranks receive in one go: entry [r, i] is the i-th row that rank r receives, -1 where there is none.

    The row of global slot `source` is copied to the staging row of slot `target`, which lies on rank r.
    """

    source: Int32[np.ndarray, "R M"]
    target: Int32[np.ndarray, "R M"]

    @property
    def num_rows(self) -> int:
        return int((self.source >= 0).sum())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerMigration:
    """How one layer comes from its old placement to the next one.

    `transfers` are (source slot, target slot) pairs, the target on another rank: one per expert and rank that does not
    hold it yet, no more. `commit` says for each slot where its row then comes from, as a number on its own rank: v < Q
    is live row v (its own: it stays), v >= Q the staging row of slot v - Q. All are read before any is written.
    """

    layer: int
    slot_owner: Int32[np.ndarray, "X"]  # after the commit
    transfers: Int32[np.ndarray, "n 2"]
    commit: Int32[np.ndarray, "R Q"]

    def slices(self, rows: int) -> Iterator[TransferSlice]:
        """The transfers, so that no rank sends or receives more than `rows` rows in a slice.

        All slices have the same shape. Ranks with the most rows left go first, which keeps the slices few.
        """
        ranks, quota = self.commit.shape
        left = [(int(source), int(target)) for source, target in self.transfers]
        while left:
            ends = np.array(left) // quota
            sends, receives = (np.bincount(ends[:, side], minlength=ranks) for side in (0, 1))
            urgency = np.maximum(sends[ends[:, 0]], receives[ends[:, 1]])
            source, target = np.full((2, ranks, rows), -1, np.int32)
            sent, received, rest = [0] * ranks, [0] * ranks, []
            for i in np.argsort(-urgency, kind="stable"):
                (sender, receiver), turn = ends[i], received[ends[i, 1]]
                if sent[sender] == rows or turn == rows:
                    rest.append(i)
                    continue
                source[receiver, turn], target[receiver, turn] = left[i]
                sent[sender] += 1
                received[receiver] += 1
            left = [left[i] for i in sorted(rest)]
            yield TransferSlice(source=source, target=target)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MigrationPlan:
    """The layers that move, in the order in which they do."""

    layers: tuple[LayerMigration, ...]
    least_transfers: int  # no way to the same experts on the same ranks has fewer

    @property
    def num_transfers(self) -> int:
        """Rows that go from one rank to another."""
        return sum(len(one.transfers) for one in self.layers)


def plan_migration(old: Int32[np.ndarray, "L X"], wanted: Int32[np.ndarray, "L X"], layout: ExpertLayout,
                   order: Int32[np.ndarray, "n"] | None = None) -> MigrationPlan:  # fmt: skip
    """What must move for `wanted` to follow `old`; layers in `order`, or all that differ from the first on.

    A pure function: every host comes to the same plan. Raises ValueError as `layers_to_move` does.
    """
    return MigrationPlan(
        layers=tuple(plan_layer(x, old[x], wanted[x], layout) for x in layers_to_move(old, wanted, order)),
        least_transfers=count_arrivals(old, wanted, layout),
    )


def layers_to_move(old: Int32[np.ndarray, "L X"], wanted: Int32[np.ndarray, "L X"],
                   order: Int32[np.ndarray, "n"] | None = None) -> list[int]:  # fmt: skip
    """Those that differ, in `order`, or from the first on. Raises ValueError unless `order` names each of them once."""
    differs = (old != wanted).any(1)
    layers = [int(x) for x in (np.arange(len(old)) if order is None else order) if differs[x]]
    if sorted(layers) != np.flatnonzero(differs).tolist():
        raise ValueError("the order must name every layer that differs, and once")
    return layers


def count_arrivals(old: Int32[np.ndarray, "L X"], wanted: Int32[np.ndarray, "L X"], layout: ExpertLayout) -> int:
    """Pairs of expert and rank that are in `wanted` and not in `old`: rows that must cross, whoever sends them."""
    held = np.zeros((2, len(old), layout.ranks, layout.num_experts + 1), bool)
    for one, owner in zip(held, (old, wanted), strict=True):
        np.put_along_axis(one, owner.reshape(len(old), layout.ranks, -1), True, -1)  # -1 is the last column
    return int((held[1] & ~held[0])[..., :-1].sum())


def plan_layer(layer: int, old: Int32[np.ndarray, "X"], wanted: Int32[np.ndarray, "X"],
               layout: ExpertLayout) -> LayerMigration:  # fmt: skip
    """What must move within one layer. It takes about 2 ms for 416 slots: whoever has no time plans layer by layer."""
    quota = layout.slots_per_rank
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(old.tolist()):
        holders.setdefault(expert, []).append(slot)

    commit = np.tile(np.arange(quota, dtype=np.int32), (layout.ranks, 1))
    arriving: dict[tuple[int, int], int] = {}  # (expert, rank) -> the slot whose staging row receives it
    for slot in np.flatnonzero((old != wanted) & (wanted >= 0)).tolist():
        rank, place = divmod(slot, quota)
        expert = int(wanted[slot])
        here = [held for held in holders[expert] if held // quota == rank]
        if here:
            commit[rank, place] = here[0] % quota
        else:
            commit[rank, place] = quota + arriving.setdefault((expert, rank), slot) % quota

    # Who sends: of the ranks that hold the expert the one that sends least so far. Those without a choice come first.
    sent, transfers = [0] * layout.ranks, []
    for (expert, _), slot in sorted(arriving.items(), key=lambda entry: (len(holders[entry[0][0]]), entry[1])):
        source = min(holders[expert], key=lambda held: (sent[held // quota], held))
        sent[source // quota] += 1
        transfers.append((source, slot))
    return LayerMigration(
        layer=layer, slot_owner=wanted, commit=commit,
        transfers=np.array(sorted(transfers, key=lambda pair: pair[1]), np.int32).reshape(-1, 2),
    )  # fmt: skip
