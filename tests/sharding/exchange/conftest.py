"""A MoE layer over an exchange on virtual devices, compiled once per exchange, number of ranks and experts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from widemesh.pallas_kernels.grouped_moe import ExpertMath, grouped_moe
from widemesh.sharding import make_mesh
from widemesh.sharding.exchange import Exchange, make_exchange

MATH = ExpertMath(limit=2.0)


def gated(x, slots, weights, w1, w3, w2, *, implementation="dense"):
    """The experts of the model."""
    return grouped_moe(x, slots, weights, w1, w3, w2, MATH, implementation=implementation)


grouped = functools.partial(gated, implementation="grouped")


def term_by_term(x, slots, weights, w1, w3, w2):
    """Experts that are w1 alone, each output one chain of additions: the bits cannot depend on the number of rows."""
    total = jnp.zeros((len(x), w1.shape[1]))
    for k in range(slots.shape[1]):
        is_held = (slots[:, k] >= 0) & (slots[:, k] < len(w1))
        matrix = w1[jnp.where(is_held, slots[:, k], 0)]  # [M, F, D]
        terms = jnp.moveaxis(matrix * x[:, None, :], 2, 0)
        out, _ = jax.lax.scan(lambda acc, term: (acc + term, None), jnp.zeros(terms.shape[1:]), terms)
        total = total + jnp.where(is_held[:, None], out * weights[:, k, None], 0)
    return total


@functools.cache
def _layer(form: str, ranks: int, batch_invariant: bool, run: Callable) -> tuple[Exchange, Callable]:
    exchange = make_exchange(form, axis="ep", platform="cpu", batch_invariant=batch_invariant)

    def layer(x, slots, weights, experts, w1, w3, w2):
        sent = exchange.dispatch(x, slots, weights, len(w1), experts)
        return exchange.combine(run(sent.x, sent.slots, sent.weights, w1, w3, w2), sent)

    spec, mesh = PartitionSpec("ep"), make_mesh(jax.devices()[:ranks])
    return jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=(spec,) * 7, out_specs=spec, check_vma=False))


@pytest.fixture(scope="session")
def moe() -> Callable[..., np.ndarray]:
    """(form, ranks, x, slots, weights, experts, matrices, batch_invariant=, run=) -> rows after the exchange."""

    def call(form, ranks, x, slots, weights, experts, matrices, *, batch_invariant=False, run=gated):
        return np.asarray(_layer(form, ranks, batch_invariant, run)(x, slots, weights, experts, *matrices))

    call.gated, call.grouped, call.term_by_term, call.compiled = gated, grouped, term_by_term, _layer
    return call
