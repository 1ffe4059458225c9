"""The draft on golden lists: every intermediate of a pass behind each anchor, and however its context came.

Golden drafts stand behind several anchors of `long`: the anchor at position p is the newest token, and its context are
the positions p - W .. p - 1. Here the anchors are the slots of one batch; each has run its own prefix of the list.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from widemesh.model import draft_keys
from widemesh.model.cache import init_cache, page_layout, private_pages
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.draft import DraftAttention, DraftLayer, block_rows
from widemesh.model.embedding import Embedding
from widemesh.model.keys import keys_of
from widemesh.model.loading import read_parameters, split_model
from widemesh.model.numerics import NUMERICS
from widemesh.model.rope import RopeTables
from widemesh.model.shared import Shared
from widemesh.model.step import DictRecorder, Rows, StepContext, StepSettings

PAGE = 4
CHUNK = 7
TOLERANCE = 2e-5  # relative L2 per row; f32 noise is 3e-6


class Drafts:
    """A golden checkpoint with its draft, and the anchors as slots of a batch; the last slot runs the whole list."""

    def __init__(self, golden: Any):
        self.golden, block = golden, golden.config.dspark_block_size
        self.config = golden.config.with_draft(block)
        checkpoint = Checkpoint.open(golden.folder, num_speculative_tokens=block)
        state = read_parameters(self.config, checkpoint.read, np.arange(self.config.n_routed_experts))
        self.parameters: Any = jax.tree.map(jnp.asarray, state)
        self.rope = jax.tree.map(jnp.asarray, RopeTables.build(self.config, golden.length + block))
        self.ids = golden.inputs["long"]
        self.anchors = golden.draft["anchor_positions"][0]
        self.lengths = np.array([*self.anchors, golden.length], np.int32)
        self.engram = golden.hash.rows(self.ids)

    def wanted(self, mode: str, name: str) -> np.ndarray:
        """Golden values, one row per anchor and row of the pass, or per position of the list."""
        value = self.golden.draft[f"{mode}.{name}"]
        value = value if name.endswith("topk_ids") else value[0]
        return value.reshape(len(self.anchors), -1, *value.shape[1:]) if name.startswith("mtp.") else value

    def cache(self, mode: str) -> Any:
        """Empty state of all slots."""
        slots, pages = len(self.lengths), -(-self.golden.length // PAGE)
        layout = page_layout(self.config, NUMERICS[mode], PAGE)
        return private_pages(
            init_cache(self.config, layout, slots=slots, pages=1 + slots * pages, table_pages=pages)
        )

    def rows(self, begin: int, size: int, lengths: np.ndarray | None = None) -> Rows:
        """Rows begin .. begin + size - 1 of every slot, as far as its prefix goes."""
        tokens = np.zeros((1, size), np.int32)
        engram = np.zeros((1, size, *self.engram.shape[2:]), np.int32)
        part = self.ids[:, begin : begin + size]
        tokens[:, : part.shape[1]], engram[:, : part.shape[1]] = part, self.engram[:, begin : begin + size]
        slots = len(self.lengths)
        length = np.clip((self.lengths if lengths is None else lengths) - begin, 0, size).astype(np.int32)
        return Rows.of(
            jnp.asarray(np.repeat(tokens, slots, axis=0)), jnp.full(slots, begin, jnp.int32), jnp.asarray(length),
            jnp.asarray(np.repeat(engram, slots, axis=0)),
        )  # fmt: skip

    def block(self) -> Rows:
        """The rows of a pass: the anchors, and noise behind them. The last slot is idle."""
        newest = np.append(self.ids[0, self.anchors], 0).astype(np.int32)
        tokens = block_rows(jnp.asarray(newest), self.config)
        length = np.append(np.full(len(self.anchors), tokens.shape[1]), 0)
        return Rows.of(
            tokens, jnp.asarray(self.lengths), jnp.asarray(length, jnp.int32),
            jnp.zeros((*tokens.shape, *self.engram.shape[2:]), jnp.int32),
        )  # fmt: skip

    def context(self, mode: str, rows: Rows, recorder: Any = None) -> StepContext:
        """Of any step."""
        settings = StepSettings(numerics=NUMERICS[mode], selection="indices", start_bound=self.golden.length)
        return StepContext(rows, self.rope, settings, recorder or DictRecorder())

    # --- running -----------------------------------------------------------------------------------------------------

    @functools.cache  # noqa: B019 - one object per checkpoint and process
    def forward(self, mode: str) -> Any:
        """The program of a forward step over all slots: what it records of the draft, and the new caches."""
        graph, _ = split_model(self.config)

        @jax.jit
        def forward(parameters, cache, rows):
            step = self.context(mode, rows)
            _, cache = nnx.merge(graph, parameters)(cache, step)
            return kept(step), cache

        return forward

    def run(self, mode: str, padded: int, chunk: int, until: int | None = None) -> tuple[dict[str, np.ndarray], Any]:
        """Records and caches of all prefixes, `chunk` ids at a time in steps of `padded` rows.

        Longer prefixes than `until` are not run.
        """
        cache, records = self.cache(mode), []
        lengths = self.lengths if until is None else np.where(self.lengths > until, 0, self.lengths)
        for begin in range(0, lengths.max(), chunk):
            rows = self.rows(begin, padded, lengths=np.minimum(lengths, begin + chunk))
            found, cache = self.forward(mode)(self.parameters, cache, rows)
            records.append({name: np.asarray(value[:, :chunk]) for name, value in found.items()})
        return {name: np.concatenate([part[name] for part in records], axis=1) for name in records[0]}, cache

    def behind(self, mode: str, features: np.ndarray) -> Any:
        """The caches of a draft whose context is made of these features of every slot, operation by operation."""
        model = nnx.merge(split_model(self.config)[0], self.parameters)
        step, cache = self.context(mode, self.rows(0, self.golden.length)), self.cache(mode)
        parts = jnp.split(jnp.asarray(features), len(self.config.dspark_target_layer_ids), axis=-1)
        main, shared = model.mtp[0].project_features(tuple(parts), step), Shared.start(cache, self.config, step)
        layers = [
            block.write_context(main, own, shared, step.draft_layer(stage))
            for stage, (block, own) in enumerate(zip(model.mtp, cache.layers[self.golden.depth :], strict=True))
        ]
        return dataclasses.replace(cache, layers=(*cache.layers[: self.golden.depth], *layers))

    def drafts(self, mode: str, cache: Any, rows: Rows | None = None, *, jit: bool = True) -> dict[str, np.ndarray]:
        """What a pass records and proposes behind every anchor, [anchors, rows, ...]."""
        program = self.propose(mode) if jit else self.propose.__wrapped__(self, mode, jit=False)
        found = program(self.parameters, cache, rows or self.block())
        count, size = len(self.anchors), self.config.num_speculative_tokens
        flat = {name: x.reshape(-1, size, x.shape[-1]) if name.endswith("topk_ids") else x for name, x in found.items()}
        return {name: np.asarray(x[:count]) for name, x in flat.items()}

    @functools.cache  # noqa: B019
    def propose(self, mode: str, *, jit: bool = True) -> Any:
        """The program of a pass, or the same operation by operation."""
        graph, _ = split_model(self.config)

        def propose(parameters, cache, rows):
            step = self.context(mode, rows)
            proposal, _ = nnx.merge(graph, parameters).propose(cache, step)
            chain = [step.recorder.values[f"draft.logits.{row}"] for row in range(rows.tokens.shape[1])]
            return {
                **kept(step), "logits": jnp.stack(chain, axis=1), "tokens": proposal.tokens,
                "confidence": proposal.confidence,
            }  # fmt: skip

        return jax.jit(propose) if jit else propose

    @functools.cache  # noqa: B019
    def whole(self, mode: str) -> tuple[dict[str, np.ndarray], Any]:
        """Records and caches of the prefixes: B in one step, A in chunks of 7, a program that serves more tests."""
        size = CHUNK if self.golden.name == "A" else self.golden.length
        return self.run(mode, size, size)


def kept(step: StepContext) -> dict[str, Any]:
    """What belongs to the draft."""
    return {name: value for name, value in step.recorder.values.items() if name.startswith(("draft.", "mtp."))}


@functools.cache
def drafts_of(golden: Any) -> Drafts:
    """Once per checkpoint and process."""
    return Drafts(golden)


@pytest.fixture
def drafts(golden) -> Drafts:
    """Golden A and B in turn."""
    return drafts_of(golden)


@pytest.fixture
def drafts_a(load_golden) -> Drafts:
    """Golden A, where one checkpoint is enough."""
    return drafts_of(load_golden("A"))


def compared(drafts: Drafts, mode: str, found: dict[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Found and golden values of a pass by golden name."""
    names = {
        "raw_hidden_states": "draft.collapsed", "normalized_hidden_states": "draft.normed",
        "base_logits": "draft.base_logits", "draft_logits": "logits", "confidence_official": "confidence",
    }  # fmt: skip
    for stage in range(drafts.config.num_nextn_predict_layers):
        own = f"mtp.{stage}."
        names |= {own + name: own + name for name in ("streams_out", "attn.output", "ffn.topk_ids")}
        names[own + "pre_mix_out"] = own + "ffn_hc.pre"
    pairs = {name: (found[own], drafts.wanted(mode, name)) for name, own in names.items()}
    return {**pairs, "greedy_token_ids": (found["tokens"], drafts.wanted(mode, "greedy_token_ids")[:, 1:])}


def errors_of(drafts: Drafts, mode: str, found: dict[str, np.ndarray], distance: Any) -> dict[str, np.ndarray]:
    """Relative L2 per row of each; 0 or infinity for ids, which must be equal."""
    errors = {}
    for name, (own, golden) in compared(drafts, mode, found).items():
        assert own.shape == golden.shape, name
        errors[name] = np.where(own == golden, 0, np.inf) if name.endswith("ids") else distance(own, golden)
    return errors


# --- against the golden values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["plain", "kvq"])
def test_context_is_golden(drafts, distance, mode):
    """Features and what all layers make their context of, at every position and in every slot that runs it.

    With quantised caches a value on a rounding boundary may fall to the other side.
    """
    records, _ = drafts.whole(mode)
    for own, name in (("draft.features", "target_hidden_states"), ("draft.main", "main_x")):
        wanted = drafts.wanted(mode, name)
        errors = np.concatenate([
            distance(records[own][slot, :length], wanted[:length]) for slot, length in enumerate(drafts.lengths)
        ])  # fmt: skip
        if mode == "plain":
            assert errors.max() < TOLERANCE, name
        else:
            assert np.median(errors) < 1e-5 and np.mean(errors < 1e-4) >= 0.95, name


def test_every_value_of_a_pass_is_golden(drafts, distance):
    """Streams, attention, experts and mixes of each layer, states, logits with and without the chain, and confidence.
    """
    errors = errors_of(drafts, "plain", drafts.drafts("plain", drafts.whole("plain")[1]), distance)
    assert {name: error.max() for name, error in errors.items() if not error.max() < TOLERANCE} == {}
    assert len(errors) == 6 + 4 * drafts.config.num_nextn_predict_layers


def test_quantised_caches_are_golden(drafts, distance):
    """The same, but for one anchor: all its rows read a key that falls to the other side of a rounding boundary."""
    errors = errors_of(drafts, "kvq", drafts.drafts("kvq", drafts.whole("kvq")[1]), distance)
    of_anchors = {name: error.reshape(len(error), -1).max(axis=1) for name, error in errors.items()}
    assert {name: error for name, error in errors.items() if not np.median(error) < 1e-5} == {}
    assert {name: error for name, error in of_anchors.items() if not error.max() < 1e-2} == {}
    assert np.sum(np.max(list(of_anchors.values()), axis=0) > 1e-4) <= 1


def test_a_pass_enters_with_the_anchor_and_noise(drafts):
    """Row 0 is the newest token."""
    rows, table = drafts.block(), np.asarray(drafts.parameters["embed"]["weight"].get_value())
    embedded = table[np.asarray(rows.tokens)[:-1]]
    wanted = drafts.wanted("plain", "noise_embeddings").reshape(embedded.shape)
    assert np.array_equal(embedded, wanted)


def test_features_are_what_enters_the_layers(drafts, distance):
    """Golden features are the mean input of each target layer, far from that of its neighbours."""
    streams = [drafts.golden.outputs["plain"][f"layers.{layer}.streams_out"] for layer in range(drafts.golden.depth)]
    means = [value[0].mean(axis=1) for value in streams]  # mean n enters layer n + 1
    targets = drafts.config.dspark_target_layer_ids
    golden = np.split(drafts.wanted("plain", "target_hidden_states"), len(targets), axis=-1)
    for layer, wanted in zip(targets, golden, strict=True):
        assert distance(means[layer - 1], wanted).max() < TOLERANCE
        assert min(distance(means[other], wanted).min() for other in (layer - 2, layer)) > 100 * TOLERANCE


# --- however the context came ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3])
def test_chunks_lead_to_the_same_drafts(drafts_a, distance, chunk):
    """As chunks of 7 do, and what is golden, for prompts within the window and beyond it."""
    until = 26
    _, cache = drafts_a.run("plain", CHUNK, chunk, until)
    found, slots = drafts_a.drafts("plain", cache), drafts_a.anchors <= until
    errors = errors_of(drafts_a, "plain", found, distance)
    assert {name: error[slots].max() for name, error in errors.items() if not error[slots].max() < TOLERANCE} == {}
    assert slots.sum() == 4


def test_rows_that_were_not_accepted_leave_no_trace(drafts_a):
    """Rows beyond the anchor have run and were given up: the same drafts, to the last bit."""
    _, cache = drafts_a.whole("plain")
    wanted = drafts_a.drafts("plain", cache)
    rows, more = drafts_a.block(), drafts_a.config.num_speculative_tokens
    wrong = dataclasses.replace(
        rows, tokens=jnp.pad(rows.tokens, [(0, 0), (0, CHUNK - more)]),
        engram_rows=jnp.pad(rows.engram_rows, [(0, 0), (0, CHUNK - more), (0, 0), (0, 0)]),
    )  # fmt: skip
    _, cache = drafts_a.forward("plain")(drafts_a.parameters, cache, wrong)
    found = drafts_a.drafts("plain", cache)
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


# --- mutants ---------------------------------------------------------------------------------------------------------


def context_with_attention_norm(original, self, main, cache, shared, step):
    return original(self, self.attn_norm(main, step.numerics), cache, shared, step)


def chain_from_the_anchor(monkeypatch):
    original, first = Embedding.__call__, []

    def wrong(self, ids, step):
        if ids.shape[1] > 1:
            return original(self, ids, step)
        first.append(ids)
        return original(self, first[0], step)

    monkeypatch.setattr(Embedding, "__call__", wrong)


def replaced(place: Any, name: str, wrong: Any) -> Any:
    """Puts `wrong(original, *args)` in place of a function or method."""
    original = getattr(place, name)
    return lambda monkeypatch: monkeypatch.setattr(place, name, lambda *args: wrong(original, *args))


MUTANTS = {
    "causal block": replaced(DraftAttention, "keys", lambda original, self, step: keys_of(step)),
    "compressed rope": replaced(DraftAttention, "rope", lambda original, self, step: step.rope.compressed),
    "no sink": replaced(draft_keys, "value", lambda original, sink: jnp.full_like(original(sink), -1e30)),
    "sink of another head": replaced(draft_keys, "value", lambda original, sink: jnp.roll(original(sink), 1)),
    "context normed as rows are": replaced(DraftLayer, "write_context", context_with_attention_norm),
    "no norm of the features": replaced(DraftLayer, "project_features", lambda original, self, features, step: (
        self.main_proj(jnp.concatenate(features, axis=-1), step.numerics))),
    "confidence of the normed state": replaced(
        DraftLayer, "choose", lambda original, self, newest, state, logits, step: original(
            self, newest, self.norm(state, step.numerics), logits, step)),
    "chain from the anchor": chain_from_the_anchor,
}  # fmt: skip
CONFIGS = {
    "context one short": lambda config: {"sliding_window": config.sliding_window - 1},
    "context one long": lambda config: {"sliding_window": config.sliding_window + 1},
}
ROWS = {
    "a position late": lambda rows: dataclasses.replace(rows, start=rows.start + 1),
    "no noise": lambda rows: dataclasses.replace(rows, tokens=jnp.broadcast_to(rows.tokens[:, :1], rows.tokens.shape)),
}


@pytest.fixture(scope="module")
def features(load_golden):
    """Golden features, the same for every slot."""
    drafts = drafts_of(load_golden("A"))
    wanted = drafts.wanted("plain", "target_hidden_states")
    return np.repeat(wanted[None], len(drafts.lengths), axis=0)


def worst(drafts, features, distance, rows=None):
    """The largest error of a pass behind golden features, in units of what is allowed."""
    found = drafts.drafts("plain", drafts.behind("plain", features), rows, jit=False)
    return max(error.max() for error in errors_of(drafts, "plain", found, distance).values()) / TOLERANCE


def test_without_a_mutant(drafts_a, features, distance):
    assert worst(drafts_a, features, distance) < 1


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails(drafts_a, features, distance, monkeypatch, name):
    MUTANTS[name](monkeypatch)
    assert worst(drafts_a, features, distance) > 100


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_configuration_fails(drafts_a, features, distance, monkeypatch, name):
    config = drafts_a.config
    monkeypatch.setattr(drafts_a, "config", dataclasses.replace(config, **CONFIGS[name](config)))
    assert worst(drafts_a, features, distance) > 100


@pytest.mark.parametrize("name", ROWS)
def test_wrong_rows_fail(drafts_a, features, distance, name):
    assert worst(drafts_a, features, distance, ROWS[name](drafts_a.block())) > 100
