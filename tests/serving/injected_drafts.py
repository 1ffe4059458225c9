"""Drafts that a test chooses, in place of those that the model proposes.

With random weights next to nothing that the draft proposes is ever drawn. Engines made inside `injecting` take their
drafts from a table by position and newest token. It is an argument of the decode program and rides with the rope
tables, so that a test may set another one without compiling anything. The draft itself runs all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int32

from widemesh.model.cache import Cache
from widemesh.model.config import ModelConfig
from widemesh.model.draft import Proposal
from widemesh.model.rope import RopeTables
from widemesh.model.step import StepContext
from widemesh.model.transformer import Transformer
from widemesh.serving import Engine, mesh_state
from widemesh.serving.device import DecodeResult, DecodeStep
from widemesh.sharding.own_ranks import place_everywhere

NONE = -1  # no draft here, nor behind
_OWN = -2  # what the model proposes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _RopeAndDrafts(RopeTables):
    drafts: Int32[Array, "positions V D"]


@contextlib.contextmanager
def injecting() -> Iterator[None]:
    """Engines constructed within have a table of drafts, in which there are none to begin with."""
    propose = Transformer.propose

    def build(config: ModelConfig, positions: int) -> _RopeAndDrafts:
        rope = RopeTables.build(config, positions)
        none = np.full((positions, config.vocab_size, config.num_speculative_tokens), NONE, np.int32)
        return _RopeAndDrafts(rope.plain, rope.compressed, none)  # type: ignore[arg-type]

    def look_up(model: Transformer, cache: Cache, step: StepContext) -> tuple[Proposal, Cache]:
        proposal, cache = propose(model, cache, step)
        table: Any = step.rope.drafts  # type: ignore[attr-defined]
        chosen = table[step.rows.start, step.rows.tokens[:, 0]]
        return dataclasses.replace(proposal, tokens=jnp.where(chosen == _OWN, proposal.tokens, chosen)), cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_state, "RopeTables", SimpleNamespace(build=build))
        patch.setattr(Transformer, "propose", look_up)
        yield


def set_drafts(engine: Engine, known: Sequence[np.ndarray], *, wrong: float = 0.0, seed: int = 0) -> None:
    """Draft what follows in one of the `known` lists of tokens, and anything behind their ends.

    With a chance of `wrong` for each place it holds another token, or no draft from there on.
    """
    table, rng = np.full(_table(engine).shape, NONE, np.int32), np.random.default_rng(seed)
    positions, vocab, count = table.shape
    for ids in known:
        anything = rng.integers(3, vocab, count)
        longer = np.concatenate([ids, anything]).astype(np.int32)
        for position in range(min(len(ids), positions)):
            drafts = longer[position + 1 : position + 1 + count].copy()
            drafts = np.concatenate([drafts, anything])[:count]
            for place in np.flatnonzero(rng.random(count) < wrong):
                if rng.random() < 0.3:
                    drafts[place:] = NONE
                    break
                drafts[place] = (drafts[place] + rng.integers(1, vocab - 3) - 3) % (vocab - 3) + 3
            table[position, ids[position]] = drafts
    _set_table(engine, table)


def use_own_drafts(engine: Engine) -> None:
    """Draft what the model proposes."""
    _set_table(engine, np.full(_table(engine).shape, _OWN, np.int32))


def _table(engine: Engine) -> Int32[Array, "positions V D"]:
    rope: Any = engine.device.decode.rope
    return rope.drafts


def _set_table(engine: Engine, table: Int32[np.ndarray, "positions V D"]) -> None:
    decode = engine.device.decode
    rope: Any = dataclasses.replace(decode.rope, drafts=place_everywhere(table, decode.replicated))
    engine._loop.call(lambda: setattr(decode, "rope", rope))


@dataclasses.dataclass
class Watch:
    """Decode steps in their order, what they came to, and how many there were before each request joined its slot."""

    steps: list[DecodeStep] = dataclasses.field(default_factory=list)
    results: dict[int, DecodeResult] = dataclasses.field(default_factory=dict)  # by the step's `id`
    joins: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (steps before, slot)
    delivered: int = 0  # tokens that requests got
    gains: int = 0  # times that a request got some

    def first_steps(self) -> Iterator[tuple[int, int]]:
        """Drafts tried and tokens drawn in the first step that each request ran after it had joined."""
        for before, slot in self.joins:
            found = (self.results.get(id(step)) for step in self.steps[before:])
            first = next((result for result in found if result is not None and result.count[slot]), None)
            if first is not None:
                yield int(first.tried[slot]), int(first.count[slot])


@contextlib.contextmanager
def watching(engine: Engine) -> Iterator[Watch]:
    """Note the steps of an engine meanwhile."""
    watch, device, wait = Watch(), engine.device, DecodeStep.wait
    join, decode_step, scheduler = device.join, device.decode_step, engine._loop._scheduler
    apply_decode = scheduler.apply_decode

    def see_result(step: DecodeStep) -> DecodeResult:
        result = watch.results[id(step)] = wait(step)
        return result

    def see_join(slot: int, row: Any) -> None:
        watch.joins.append((len(watch.steps), slot))
        join(slot, row)

    def see_step(*args: Any, **kwargs: Any) -> DecodeStep:
        watch.steps.append(decode_step(*args, **kwargs))
        return watch.steps[-1]

    def see_tokens(*args: Any) -> Any:
        accepted = apply_decode(*args)
        watch.delivered += int(accepted.counts.sum())
        watch.gains += int(np.count_nonzero(accepted.counts))
        return accepted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "apply_decode", see_tokens)
        patch.setattr(DecodeStep, "wait", see_result)
        patch.setattr(device, "join", see_join)
        patch.setattr(device, "decode_step", see_step)
        yield watch
