"""The programs that move one layer's expert rows: into a staging area, checked there, then into the live arrays.

    copy:    live rows of other ranks --ragged all-to-all--> staging rows    the live rows are only read
    verify:  staging rows --checksum--> how many differ from what was sent
    commit:  live and staging rows --choose--> new live arrays

A layer is a tree of global arrays [X, ...], each cut along its first axis over `ep` and perhaps along another over
`tp`: every device moves its part of a row to the device in the same place of another rank. R ranks, Q slots of a rank,
X = R * Q, and M rows that a rank sends, or receives, in a slice at the most.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, UInt32

from widemesh.sharding.axes import EP_AXIS, TP_AXIS
from widemesh.sharding.exchange.ragged_rows import send_rows
from widemesh.sharding.kept import Kept, once
from widemesh.sharding.migrate.checksum import row_checksums
from widemesh.sharding.migrate.words import from_words, to_words

_EVERYWHERE = PartitionSpec()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Staging:
    """Where the rows of a layer in flight arrive."""

    rows: Any  # a tree like the layer's, laid out like it
    checksums: UInt32[Array, "X tp"]  # of each device's part of a row, as its sender computed it


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MigrationPrograms:
    """Programs for layers of one form, each compiled on its first call.

    Slots are global numbers. Arrays named `source`, `target` and `index` are the same on every rank, and so is
    `stamp`, a number that tells this migration of a layer from the ones before: rows that an earlier one has left in
    the staging area do not pass for this one's.
    """

    layer: Any  # shapes of a layer's arrays: ShapeDtypeStruct [X, ...] with a NamedSharding each, X over `ep`
    is_native: bool  # False: rows cross by the stand-in for platforms without a ragged all-to-all
    _made: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def row_bytes(self) -> int:
        """Of one slot's row, all its parts together."""
        return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.layer))

    @property
    def staging_bytes(self) -> int:
        """That the staging area holds on each device: the rows of one layer, and their checksums.

        While a commit runs, its result takes the same again.
        """
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(self.abstract_staging)
        )  # fmt: skip

    @property
    def abstract_staging(self) -> Staging:
        """Shapes and shardings of the staging area."""
        checksums = jax.ShapeDtypeStruct(
            (self._ranks * self._held, self._mesh.shape[TP_AXIS]), jnp.uint32,
            sharding=NamedSharding(self._mesh, PartitionSpec(EP_AXIS, TP_AXIS)),
        )  # fmt: skip
        return Staging(rows=self.layer, checksums=checksums)  # type: ignore[arg-type]

    @functools.cached_property
    def stage(self) -> Kept[Staging]:
        """() -> a staging area of zeros, made where it lies."""

        def make() -> Staging:
            zeros: Staging = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract_staging)
            return zeros

        return Kept(jax.jit(make, out_shardings=self._shardings), has_collectives=False)

    @once
    def copy(self, rows: int) -> Kept[Staging]:
        """(layer, staging, source [R, rows], target [R, rows], stamp) -> staging, which is donated.

        The row of slot `source[r, i]` goes to the staging row of slot `target[r, i]`, which lies on rank r; both are -1
        for none. No rank may be named as a source more than `rows` times. Each row crosses once, with a checksum of
        four bytes per device; without the collective, every rank's rows go to all. In between a device holds `rows`
        rows twice: those that it sends, and those that arrive.
        """

        def copy(
            live: Any, staging: Staging, source: Int32[Array, "R M"], target: Int32[Array, "R M"], stamp: Array
        ) -> Staging:
            me, held = jax.lax.axis_index(EP_AXIS), self._held
            sender = jnp.where(source < 0, -1, source // held)
            counts = jnp.sum(sender[None] == jnp.arange(self._ranks)[:, None, None], axis=2, dtype=jnp.int32)

            (mine,) = jnp.nonzero(sender.ravel() == me, size=rows, fill_value=source.size)  # ascending receivers
            sent_from, sent_to = (x.ravel().at[mine].get(mode="fill", fill_value=-1) for x in (source, target))
            place = jnp.maximum(sent_from - me * held, 0)
            sent = jax.tree.map(lambda array: array[place], live)
            checksums = row_checksums(sent, self._seeds(sent_from, sent_to, stamp))
            words = jnp.concatenate([to_words(sent), checksums[:, None]], axis=1)
            arrived = send_rows(words, counts, axis=EP_AXIS, room=rows, is_native=self.is_native)

            # They lie in order of the rank they come from. Past the end = dropped, each at a place of its own.
            order = jnp.argsort(jnp.where(sender[me] < 0, self._ranks, sender[me]), stable=True)
            slot = target[me][order]
            into = jnp.where(slot < 0, held + jnp.arange(rows), slot - me * held)

            def put(whole: Array, part: Array) -> Array:
                return whole.at[into].set(part, mode="drop", unique_indices=True)

            return Staging(
                rows=jax.tree.map(put, staging.rows, from_words(arrived[:, :-1], live)),
                checksums=put(staging.checksums, arrived[:, -1:]),
            )

        specs = self._specs
        mapped = self._mapped(copy, (specs.rows, specs, *[_EVERYWHERE] * 3), specs)
        return Kept(jax.jit(mapped, donate_argnums=1, out_shardings=self._shardings), has_collectives=True)

    @functools.cached_property
    def verify(self) -> Kept[Int32[Array, ""]]:
        """(staging, source [R, Q], stamp) -> rows of all ranks that are not what their sender had, on every rank.

        `source` is the slot that each staging row was copied from, -1 where none was. A row counts if a bit of it has
        changed, if it was meant for another slot or comes from another one, and if it never came. Reads all staging
        rows once; one number per rank crosses.
        """

        def verify(staging: Staging, source: Int32[Array, "R Q"], stamp: Array) -> Int32[Array, ""]:
            me, held = jax.lax.axis_index(EP_AXIS), self._held
            seeds = self._seeds(source[me], me * held + jnp.arange(held), stamp)
            differs = (source[me] >= 0) & (row_checksums(staging.rows, seeds) != staging.checksums[:, 0])
            is_bad = jax.lax.psum(differs.astype(jnp.int32), TP_AXIS) > 0
            return jax.lax.psum(jnp.sum(is_bad, dtype=jnp.int32), EP_AXIS)

        mapped = self._mapped(verify, (self._specs, _EVERYWHERE, _EVERYWHERE), _EVERYWHERE)
        everywhere = NamedSharding(self._mesh, _EVERYWHERE)
        return Kept(jax.jit(mapped, out_shardings=everywhere), has_collectives=True)

    @functools.cached_property
    def commit(self) -> Kept[Any]:
        """(layer, staging, index [R, Q]) -> the layer's arrays after the commit.

        Row v of a rank becomes its own live row `index[r, v]`, or from Q on the staging row `index[r, v] - Q`. Nothing
        crosses between ranks. The result is new memory, one layer's rows of a rank. The old arrays are not donated: XLA
        would gather into temporary memory of the same size and then copy it over them, and a commit that fails would
        leave no weights. They are freed when nothing refers to them any more and what was dispatched before has run.
        """

        def commit(live: Any, staging: Staging, index: Int32[Array, "R Q"]) -> Any:
            mine, held = index[jax.lax.axis_index(EP_AXIS)], self._held

            def choose(own: Array, staged: Array) -> Array:
                is_staged = (mine >= held).reshape(-1, *[1] * (own.ndim - 1))
                return jnp.where(is_staged, staged[jnp.maximum(mine - held, 0)], own[jnp.minimum(mine, held - 1)])

            return jax.tree.map(choose, live, staging.rows)

        specs = self._specs
        mapped = self._mapped(commit, (specs.rows, specs, _EVERYWHERE), specs.rows)
        return Kept(jax.jit(mapped, out_shardings=self._shardings.rows), has_collectives=False)

    def _seeds(self, source: Int32[Array, "n"], target: Int32[Array, "n"], stamp: Array) -> UInt32[Array, "n"]:
        """Another one for every stamp, source and target."""
        slots = jnp.uint32(self._ranks * self._held)
        stamp, source, target = (x.astype(jnp.uint32) for x in (stamp, source, target))
        return (stamp * slots + source) * slots + target

    def _mapped(self, step: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(step, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    @property
    def _mesh(self) -> Mesh:
        mesh: Mesh = jax.tree.leaves(self.layer)[0].sharding.mesh
        return mesh

    @property
    def _ranks(self) -> int:
        return self._mesh.shape[EP_AXIS]

    @property
    def _held(self) -> int:
        slots: int = jax.tree.leaves(self.layer)[0].shape[0]
        return slots // self._ranks

    @property
    def _shardings(self) -> Staging:
        """Those of the layer itself, object for object: what takes the layer's arrays then knows the results."""
        shardings: Staging = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_staging)
        return shardings

    @property
    def _specs(self) -> Staging:
        specs: Staging = jax.tree.map(lambda sharding: sharding.spec, self._shardings)
        return specs
