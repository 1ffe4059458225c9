"""Moves the expert rows of the decode mesh: what a rebalance needs done on the device.

Every call returns once its work is dispatched. Programs of the decode mesh run in the order of the calls, so a decode
step dispatched before a commit runs with the old weights and maps, and one dispatched after it with the new ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int32

from widemesh.eplb import LayerMigration, TransferSlice
from widemesh.eplb.mover import LoadReading
from widemesh.model.loading import DRAFT_LAYERS
from widemesh.serving.abstract import abstract_parameters
from widemesh.serving.device import DeviceEngine
from widemesh.serving.expert_load import LoadSummary
from widemesh.serving.expert_models import DRAFT, TARGET
from widemesh.serving.programs import Programs
from widemesh.sharding import named_sharding
from widemesh.sharding.migrate import MigrationPrograms, Staging
from widemesh.sharding.own_ranks import place_everywhere

_LAYERS = {TARGET: "layers", DRAFT: DRAFT_LAYERS}  # first part of the path of a model's layers


@dataclasses.dataclass(frozen=True)
class SummaryReading:
    """A load summary on its way from the device."""

    summary: LoadSummary

    def is_ready(self) -> bool:
        """Whether all of it is there."""
        return all(part.is_ready() for part in jax.tree.leaves(self.summary))

    def value(self) -> LoadReading:
        """On the host."""
        slots, mean, busiest = (np.asarray(x) for x in (self.summary.slots, self.summary.mean, self.summary.busiest))
        return LoadReading(
            load_by_slot=slots.astype(np.int64), balancedness=float(mean / busiest) if busiest > 0 else 0.0
        )


@dataclasses.dataclass(frozen=True)
class CountVerifying:
    """A number of bad rows on its way from the device."""

    count: Int32[jax.Array, ""]

    def is_ready(self) -> bool:
        """Whether it is there."""
        return bool(self.count.is_ready())  # type: ignore[attr-defined]

    def bad_rows(self) -> int:
        """On the host."""
        return int(self.count)


class ExpertMover:
    """The `Mover` of one model's experts on a decode mesh. Slices have the `slice_rows` of its EPLB settings.

    It keeps one staging area, allocated by `warm_up` (`staging_bytes` on each device), and replaces the mesh's
    parameters and maps in a commit. Owned by the engine's thread. Whatever a call raises, it has left the weights and
    maps as they were.
    """

    def __init__(self, device: DeviceEngine, model: int = TARGET):
        self._device, self._state, self._model = device, device.decode, model
        self._placed = device.decode.experts[model]
        self.rows = device.config.eplb_of(model).slice_rows
        self._programs = migration_programs(device.decode.programs, model)
        self._staging: Staging | None = None
        # Tells a beginning of a layer from the ones before, whose rows may still lie in the staging area.
        self._stamp, self._layer = 0, -1

    @property
    def row_bytes(self) -> int:
        """Bytes of one expert's weights in one layer, scales included."""
        return self._programs.row_bytes

    @property
    def staging_bytes(self) -> int:
        """That the staging area takes on each device; the result of a commit takes as much again until it is done."""
        return self._programs.staging_bytes

    def warm_up(self) -> None:
        """Compile every program by running it on idle arguments, and allocate the staging area."""
        layout, layer = self._placed.layout, self._live(0)
        none = np.full((layout.ranks, self.rows), -1, np.int32)
        self.begin(0)
        self.copy(0, TransferSlice(source=none, target=none))
        own = np.tile(np.arange(layout.slots_per_rank, dtype=np.int32), (layout.ranks, 1))
        idle = LayerMigration(layer=0, slot_owner=self._placed.slot_owner[0], commit=own,
                              transfers=np.zeros((0, 2), np.int32))  # fmt: skip
        if self.verify(idle).bad_rows():
            raise RuntimeError("rows differ where none has moved")
        jax.block_until_ready(self._programs.commit(layer, self._staging, self._hand(own)))
        for reading in (self.read_window(), self.read_step()):
            reading.value()

    def read_window(self) -> SummaryReading:
        """Dispatch the sum over the recorded steps of the window."""
        return _reading(self._state.programs.summarise_window(self._model)(self._device.expert_loads[self._model]))

    def read_step(self) -> SummaryReading:
        """Dispatch the reading of the newest step's load."""
        return _reading(self._state.programs.summarise_step(self._model)(self._device.expert_loads[self._model]))

    def begin(self, layer: int) -> None:
        """A layer begins to move, or begins anew: its rows get a stamp that no row in the staging area has."""
        self._stamp, self._layer = (self._stamp + 1) % 2**31, layer

    def copy(self, layer: int, part: TransferSlice) -> None:
        """Dispatch the copies of a slice.

        ValueError if it has another number of rows, which would compile, or is not of the layer that was begun.
        """
        if part.source.shape[1] != self.rows:
            raise ValueError(f"a slice has {part.source.shape[1]} rows where the programs take {self.rows}")
        if layer != self._layer:
            raise ValueError(f"layer {layer} has not begun")
        # A call that raises may have taken the staging area with it; the next one then makes another.
        staging, self._staging = self._staging or self._programs.stage(), None
        given = self._hand((part.source, part.target, np.int32(self._stamp)))
        self._staging = self._programs.copy(self.rows)(self._live(layer), staging, *given)

    def verify(self, migration: LayerMigration) -> CountVerifying:
        """Dispatch the comparison of all rows that the migration stages."""
        source = np.full(self._placed.layout.num_slots, -1, np.int32)
        source[migration.transfers[:, 1]] = migration.transfers[:, 0]
        given = self._hand((source.reshape(self._placed.layout.ranks, -1), np.int32(self._stamp)))
        count = self._programs.verify(self._staging_area(), *given)
        count.copy_to_host_async()
        return CountVerifying(count)

    def commit(self, migration: LayerMigration, slot_owner: Int32[np.ndarray, "L X"]) -> None:
        """Put weights and maps of one layer in force together, for every later dispatch."""
        layer = migration.layer
        made = self._programs.commit(self._live(layer), self._staging_area(), self._hand(migration.commit))
        parameters = with_experts(self._state.parameters, layer, made, self._model)
        self._placed.move(slot_owner)
        self._state.parameters = parameters

    def _live(self, layer: int) -> dict[str, Any]:
        experts = _experts(self._state.parameters, layer, self._model)
        return {name: variable.get_value() for name, variable in experts.items()}

    def _staging_area(self) -> Staging:
        """A layer without transfers may come first."""
        if self._staging is None:
            self._staging = self._programs.stage()
        return self._staging

    def _hand(self, host: Any) -> Any:
        """Host arrays that are the same in every process, as a program takes them."""
        return host if self._state.own.is_whole else place_everywhere(host, self._state.replicated)


def migration_programs(programs: Programs, model: int = TARGET) -> MigrationPrograms:
    """Those for the expert layers of a model, all of one form. Takes shapes only: the mesh may be abstract."""
    abstract = abstract_parameters(programs.config, programs.numerics, programs.expert_layouts)
    layer = {}
    for name, variable in _experts(abstract, 0, model).items():
        sharding = named_sharding(programs.mesh, variable.axes)
        layer[name] = jax.tree.map(
            lambda x, sharding=sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            variable.get_value(),
        )
    return MigrationPrograms(layer=layer, is_native=programs.mesh.devices.flat[0].platform != "cpu")


def with_experts(
    parameters: nnx.State[Any, Any], layer: int, made: dict[str, Any], model: int = TARGET
) -> nnx.State[Any, Any]:
    """The parameters with other expert arrays in one layer. The ones given stay as they are, and share the rest.

    Only the maps on the way to the layer are copied.
    """
    experts = _experts(parameters, layer, model)
    changed: Any = {name: experts[name].replace(value) for name, value in made.items()}
    path = (_LAYERS[model], layer, "ffn", "experts")
    maps: list[Any] = [parameters.raw_mapping]
    for name in path:
        maps.append(maps[-1][name])
    for name, old in zip(reversed(path), reversed(maps[:-1]), strict=True):
        changed = {**old, name: changed}
    return nnx.State(changed)


def _experts(parameters: nnx.State[Any, Any], layer: int, model: int) -> Any:
    """The variables of a layer's expert matrices by name."""
    return parameters.raw_mapping[_LAYERS[model]][layer]["ffn"]["experts"]


def _reading(summary: LoadSummary) -> SummaryReading:
    for part in jax.tree.leaves(summary):
        part.copy_to_host_async()
    return SummaryReading(summary)
