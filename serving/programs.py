"""The device programs of the engine: prefill a chunk, hand a request over, take it in, decode a step.

Each is one pure function under one shard_map over its mesh, written per rank, with the cache donated. B slots of a
rank, S rows, R ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int32

from widemesh.model.cache import Cache, LayerCache, SourceCache
from widemesh.model.config import ModelConfig
from widemesh.model.numerics import Numerics
from widemesh.model.rope import RopeTables
from widemesh.model.step import Rows, StepContext, StepSettings, selection_form
from widemesh.model.transformer import Transformer
from widemesh.serving.sampling import SamplingRows, sample
from widemesh.sharding import EP_AXIS, AllGatherExchange, partition_spec

_PER_RANK = PartitionSpec(EP_AXIS)
_EVERYWHERE = PartitionSpec()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """Result of a decode step."""

    tokens: Int32[Array, "B"]
    is_finite: Bool[Array, "B"]  # False: the logits held NaN or infinity, the token means nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """Jitted step functions of one mesh."""

    config: ModelConfig
    numerics: Numerics
    graph: nnx.GraphDef[Transformer]
    mesh: Mesh
    max_len: int  # tokens a slot has room for

    def prefill(self, rows: int) -> Callable[[nnx.State[Any, Any], Cache, Rows, RopeTables], Cache]:
        """Run `rows` rows of each rank's request and return the new cache. No logits: decode samples every token."""

        def step(parameters: nnx.State[Any, Any], cache: Cache, batch: Rows, rope: RopeTables) -> Cache:
            model = nnx.merge(self.graph, parameters)
            _, cache = model(cache, StepContext(batch, rope, self._settings(rows)))
            return cache

        return self._jit(step, (_PER_RANK, _PER_RANK, _EVERYWHERE), _PER_RANK)

    def decode(
        self,
    ) -> Callable[[nnx.State[Any, Any], Cache, Rows, SamplingRows, RopeTables], tuple[Cache, Sampled]]:
        """Run one row of every slot and sample the token that follows it."""

        def step(
            parameters: nnx.State[Any, Any], cache: Cache, batch: Rows, sampling: SamplingRows, rope: RopeTables
        ) -> tuple[Cache, Sampled]:
            model = nnx.merge(self.graph, parameters)
            context = StepContext(batch, rope, self._settings(1))
            hidden, cache = model(cache, context)
            logits = model.logits(hidden[:, 0], context)
            tokens = sample(logits, sampling, batch.start + 1)
            return cache, Sampled(tokens, jnp.all(jnp.isfinite(logits), axis=-1))

        return self._jit(step, (_PER_RANK, _PER_RANK, _PER_RANK, _EVERYWHERE), _PER_RANK)

    def import_state(self) -> Callable[[Cache, Cache, Int32[Array, "R"]], Cache]:
        """Write one handed-over request per rank into a slot; a slot of -1 writes nothing.

        The second argument is a hand-over as `export_state` makes it, one request per rank.
        """

        def step(cache: Cache, handed: Cache, slot: Int32[Array, "1"]) -> Cache:
            return jax.tree.map(functools.partial(_write_slot, slot[0]), cache, handed)

        specs = (_PER_RANK, _PER_RANK, _PER_RANK)
        mapped = jax.shard_map(step, mesh=self.mesh, in_specs=specs, out_specs=_PER_RANK, check_vma=False)
        return jax.jit(mapped, donate_argnums=0, out_shardings=self.sharding())

    def _settings(self, rows: int) -> StepSettings:
        return StepSettings(
            numerics=self.numerics,
            selection=selection_form(rows, self.numerics),
            start_bound=self.max_len - 1,
            exchange=AllGatherExchange(axis=EP_AXIS),
        )

    def _jit(
        self, step: Callable[..., Any], specs: tuple[PartitionSpec, ...], out: PartitionSpec
    ) -> Callable[..., Any]:
        _, state = nnx.split(Transformer(self.config))
        parameters = jax.tree.map(
            lambda variable: variable.replace(partition_spec(variable.axes)),
            state,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )
        mapped = jax.shard_map(step, mesh=self.mesh, in_specs=(parameters, *specs), out_specs=out, check_vma=False)
        # Named, because XLA reports arrays without elements as replicated.
        return jax.jit(mapped, donate_argnums=1, out_shardings=self.sharding(out))

    def sharding(self, spec: PartitionSpec = _PER_RANK) -> NamedSharding:
        """Layout of an array with one part per rank (or `spec`)."""
        return NamedSharding(self.mesh, spec)


def export_state(cache: Cache, tokens: int, config: ModelConfig) -> Cache:
    """State of one slot ([1, ...] arrays) that a request of up to `tokens` tokens can have written."""
    layers = []
    for role, layer in zip(config.roles, cache, strict=True):
        source = tuple(
            SourceCache(
                part.entries[:, : tokens // role.ratio], part.index_keys[:, : tokens // role.ratio], part.pending
            )
            for part in layer.source
        )
        layers.append(LayerCache(layer.window, source))
    return tuple(layers)


def _write_slot(slot: Int32[Array, ""], whole: Array, part: Array) -> Array:
    """Write `part` [1, n, ...] over the first n rows of a slot of `whole` [B, N, ...]."""
    place = jnp.where(slot < 0, whole.shape[0], slot)  # past the end = dropped
    if part.ndim == 1:
        return whole.at[place].set(part[0], mode="drop")
    return whole.at[place, : part.shape[1]].set(part[0], mode="drop")
