"""The golden checkpoints, and their layers run one at a time with the golden values as input.

Golden A and B are small random models with every feature of the architecture; their intermediates and logits were
made by a public PyTorch implementation. One program per kind of layer serves all layers of that kind.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from widemesh.model.block import Block
from widemesh.model.cache import Cache, LayerCache, init_cache
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.checkpoint.tensor_file import TensorFile
from widemesh.model.config import LayerRole, ModelConfig
from widemesh.model.forward import load_engram_hash
from widemesh.model.indexer import Shared
from widemesh.model.loading import read_parameters, split_model
from widemesh.model.numerics import NUMERICS, Numerics
from widemesh.model.rope import RopeTables
from widemesh.model.step import DictRecorder, Rows, StepContext, StepSettings
from widemesh.pallas_kernels.sparse_attention import SelectedIndices, SelectedMask, Selection

FOLDER = Path(__file__).parents[2] / "golden"
INPUTS = ("long", "batch", "short")

# Relative L2 per row. The golden logits themselves move by 3e-6 when every linear and norm carries noise of 2e-7.
TENSOR_TOLERANCE = 2e-5
# Absolute. An error of one Sinkhorn iteration, or a missing epsilon, is too small to show anywhere else.
COMB_TOLERANCE = 5e-6
MIX_TOLERANCE = 1e-6

Records = dict[str, np.ndarray]


def read_file(path: Path) -> Records:
    """Every tensor of a safetensors file."""
    file = TensorFile.open(path)
    return {name: np.asarray(file.tensor(name)) for name in file.entries}


def relative(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Relative L2 distance along the last axis."""
    scale = np.linalg.norm(wanted, axis=-1)
    return np.linalg.norm(found - wanted, axis=-1) / np.where(scale == 0, 1, scale)


def selected_sets(selected: np.ndarray) -> list[frozenset[int]]:
    """The chosen entries of each row, from indices (-1 = none) or from a mask."""
    if selected.dtype == bool:
        return [frozenset(np.flatnonzero(row).tolist()) for row in selected.reshape(-1, selected.shape[-1])]
    return [frozenset(row[row >= 0].tolist()) for row in selected.reshape(-1, selected.shape[-1])]


def error_of(name: str, found: np.ndarray, wanted: np.ndarray) -> float:
    """How far an intermediate is from the golden one, in units of what is allowed. Choices must be equal."""
    if name.endswith("topk_indices"):
        return 0.0 if selected_sets(found) == selected_sets(wanted) else np.inf
    if found.shape != wanted.shape:
        return np.inf
    if name.endswith(("candidates", "topk_ids")):
        return 0.0 if np.array_equal(found, wanted) else np.inf
    if name.endswith("indexer_scores"):
        if not np.array_equal(np.isinf(found), np.isinf(wanted)):
            return np.inf
        found, wanted = (np.where(np.isinf(x), 0, x) for x in (found, wanted))
    if name.endswith(("_hc.pre", "_hc.post")):
        return float(np.max(np.abs(found - wanted))) / MIX_TOLERANCE
    if name.endswith("_hc.comb"):
        return float(np.max(np.abs(found - wanted))) / COMB_TOLERANCE
    error = float(np.max(relative(found, wanted)))
    return np.inf if np.isnan(error) else error / TENSOR_TOLERANCE


class Golden:
    """One golden checkpoint, loaded, with its inputs and outputs."""

    def __init__(self, name: str):
        self.name, self.folder = name, FOLDER / name
        checkpoint = Checkpoint.open(self.folder)
        self.config: ModelConfig = checkpoint.config
        self.hash = load_engram_hash(self.config, self.folder)
        self.graph, _ = split_model(self.config)
        state = read_parameters(self.config, checkpoint.read, np.arange(self.config.n_routed_experts))
        self.parameters: nnx.State[Any, Any] = jax.tree.map(jnp.asarray, state)
        self.inputs = read_file(self.folder / "inputs.safetensors")
        self.outputs = {mode: read_file(self.folder / f"outputs_{mode}_long.safetensors") for mode in ("plain", "kvq")}
        self.other = read_file(self.folder / "outputs_other.safetensors")
        self.length = self.inputs["long"].shape[1]
        self.rope = RopeTables.build(self.config, self.length)
        self.layers = range(self.config.num_hidden_layers)

    def wanted(self, mode: str, which: str, name: str) -> np.ndarray:
        """A golden output of one input, [B, S, ...]."""
        if which == "long" and mode in self.outputs:
            return self.outputs[mode][name]
        return self.other[f"{mode}.{which}.{name}"]

    def layer_outputs(self, layer: int, mode: str = "plain") -> Records:
        """Golden intermediates of one layer on `long`, by their names within the layer."""
        prefix = f"layers.{layer}."
        return {k.removeprefix(prefix): v for k, v in self.outputs[mode].items() if k.startswith(prefix)}

    # --- one layer, golden values in ---------------------------------------------------------------------------------

    def run_layer(self, layer: int, settings: StepSettings, *, mode: str = "plain", **changes: Any) -> Records:
        """Everything the layer records on `long` when what enters it is golden of `mode`.

        `changes` are passed on to `step_layer`.
        """
        streams, pre = self.entering(layer, mode)
        cache = init_cache(self.config, 1, self.length)[layer]
        shared = self.shared_before(layer, mode, settings.selection)
        rows = self.rows(self.inputs["long"][0])
        *_, records = self.step_layer(layer, settings, streams, pre, cache, shared, rows, **changes)
        return as_records(records)

    def entering(self, layer: int, mode: str) -> tuple[np.ndarray, np.ndarray]:
        """Golden streams and pre-mix that enter a layer."""
        if layer:
            before = self.layer_outputs(layer - 1, mode)
            return before["streams_out"], before["ffn_hc.pre"]
        embedded = np.asarray(self.parameters["embed"]["weight"].get_value())[self.inputs["long"]]
        streams = np.repeat(embedded[:, :, None], self.config.hc_mult, axis=2)
        first = np.eye(1, self.config.hc_mult, dtype=np.float32)[0]
        return streams, np.broadcast_to(first, streams.shape[:3])

    def shared_before(self, layer: int, mode: str, form: str) -> Shared | None:
        """Golden shared state that enters a layer: of the last sources below it."""
        outputs = self.outputs[mode]
        below = [role for role in self.config.roles[:layer] if role.owns_kv]
        if not below:
            return None
        owner = below[-1].layer
        chooser = max(role.layer for role in self.config.roles[:layer] if role.owns_index)
        entries = outputs[f"layers.{owner}.attn.compressed_kv"]
        candidates = np.ones((1, self.length, entries.shape[1]), bool)
        if 0 <= self.config.candidate_source_layer_id < layer:
            candidates = outputs[f"layers.{self.config.candidate_source_layer_id}.attn.candidates"].astype(bool)
        return Shared(
            entries,
            outputs[f"layers.{owner}.attn.index_keys"],
            selection_of(outputs[f"layers.{chooser}.attn.topk_indices"], entries.shape[1], form),
            candidates,
        )

    def rows(self, ids: np.ndarray, engram_rows: np.ndarray | None = None) -> Rows:
        """A fresh request of these ids, padded to the length of `long`."""
        tokens = np.zeros((1, self.length), np.int32)
        tokens[0, : len(ids)] = ids
        hashed = self.hash.rows(tokens) if engram_rows is None else engram_rows
        return Rows(tokens, np.zeros(1, np.int32), np.array([len(ids)], np.int32), hashed)

    def step_layer(
        self, layer: int, settings: StepSettings, streams: Any, pre: Any, cache: LayerCache, shared: Shared | None,
        rows: Rows, *, config: ModelConfig | None = None, role: LayerRole | None = None, rope: RopeTables | None = None,
        fresh: bool = False,
    ) -> tuple[Any, Any, LayerCache, Shared | None, dict[str, Any]]:
        """One layer's step. `fresh` traces it again, which a change of the code needs to have an effect."""  # fmt: skip
        program = functools.partial(Golden._layer_program.__wrapped__, self) if fresh else self._layer_program
        run = program(config or self.config, kind_of(role or self.config.roles[layer]), settings)
        parts = None if shared is None else tuple(getattr(shared, f.name) for f in dataclasses.fields(Shared))
        streams, pre, cache, parts, records = run(
            self.parameters["layers"][layer], streams, pre, cache, parts, rows, rope or self.rope
        )
        return streams, pre, cache, None if parts is None else Shared(*parts), records

    @functools.cache  # noqa: B019 - one object per checkpoint and session
    def _layer_program(self, config: ModelConfig, role: LayerRole, settings: StepSettings) -> Callable[..., Any]:
        graph, _ = nnx.split(Block(config, role))

        @jax.jit
        def run(state, streams, pre, cache, parts, rows, rope):
            recorder = DictRecorder()
            step = StepContext(rows, rope, settings, recorder)
            shared = None if parts is None else Shared(*parts)
            streams, pre, cache, shared = nnx.merge(graph, state)(streams, pre, cache, shared, step)
            parts = None if shared is None else tuple(getattr(shared, f.name) for f in dataclasses.fields(Shared))
            return streams, pre, cache, parts, recorder.values

        return run

    # --- the whole model, layer by layer -----------------------------------------------------------------------------

    def run_model(self, ids: np.ndarray, settings: StepSettings) -> Records:
        """Everything all layers record, and `logits`, for one list of ids padded to the length of `long`."""
        rows, n = self.rows(ids), len(ids)
        cache: Cache = init_cache(self.config, 1, self.length)
        streams, pre = self._enter(settings)(self.parameters, rows)
        shared = None
        records: dict[str, Any] = {}
        for layer in self.layers:
            streams, pre, _, shared, values = self.step_layer(
                layer, settings, streams, pre, cache[layer], shared, rows
            )
            records |= {f"layers.{layer}.{name}": value for name, value in values.items()}
        records |= self.leave(streams, pre, settings)
        return {name: cut(name, value, n) for name, value in as_records(records).items()}

    def leave(self, streams: Any, pre: Any, settings: StepSettings) -> dict[str, Any]:
        """`final.collapsed`, `final.normed` and `logits`."""
        return self._leave(settings)(self.parameters, streams, pre)

    @functools.cache  # noqa: B019
    def _enter(self, settings: StepSettings) -> Callable[..., Any]:
        return jax.jit(
            lambda parameters, rows: nnx.merge(self.graph, parameters).enter(StepContext(rows, self.rope, settings))
        )

    @functools.cache  # noqa: B019
    def _leave(self, settings: StepSettings) -> Callable[..., Any]:
        @jax.jit
        def run(parameters, streams, pre):
            model, recorder = nnx.merge(self.graph, parameters), DictRecorder()
            step = StepContext(self.rows(np.zeros(0, np.int32)), self.rope, settings, recorder)
            logits = model.logits(model.leave(streams, pre, step), step)
            return {**recorder.values, "logits": logits}

        return run

    # --- comparison --------------------------------------------------------------------------------------------------

    def errors(self, found: Records, wanted: Records) -> dict[str, float]:
        """Error of every wanted intermediate in units of what is allowed. All of them must have been recorded."""
        errors = {}
        for name, value in wanted.items():
            mask = name.replace("topk_indices", "topk_mask")
            own = found[mask if mask in found else name]
            if name.endswith(("compressed_kv", "index_keys")):
                own = own[:, : value.shape[1]]  # a step has room for one group more than it may complete
            errors[name] = error_of(name, own, value)
        return errors


def settings_of(numerics: str | Numerics, selection: str) -> StepSettings:
    """Settings of a fresh prefill."""
    numerics = NUMERICS[numerics] if isinstance(numerics, str) else numerics
    return StepSettings(numerics=numerics, selection=selection, start_bound=0)  # type: ignore[arg-type]


def kind_of(role: LayerRole) -> LayerRole:
    """The role without what a layer does not look at: two layers of one kind run the same program."""
    return dataclasses.replace(role, layer=role.layer if role.has_engram else 0, kv_source=None, index_source=None)


def selection_of(indices: np.ndarray, entries: int, form: str) -> Selection:
    """A golden selection in the form that a program uses."""
    if form == "indices":
        return SelectedIndices(np.sort(indices, axis=-1))
    mask = np.zeros((*indices.shape[:2], entries + 1), bool)
    np.put_along_axis(mask, np.where(indices < 0, entries, indices).astype(np.int64), True, axis=-1)
    return SelectedMask(mask[..., :entries])


def as_records(values: dict[str, Any]) -> Records:
    """Host copies, bfloat16 as float32."""
    return {k: np.asarray(v, np.float32 if v.dtype == jnp.bfloat16 else None) for k, v in values.items()}


def cut(name: str, value: np.ndarray, rows: int) -> np.ndarray:
    """The rows that are no padding; what is per entry, not per row, is left whole."""
    if name.endswith(("compressed_kv", "index_keys")):
        return value
    return value[:rows] if name.endswith(("router_logits", "topk_ids", "topk_weights")) else value[:, :rows]


@functools.cache
def load(name: str) -> Golden:
    """Load a checkpoint once per process."""
    return Golden(name)


@pytest.fixture(params=["A", "B"])
def golden(request) -> Golden:
    """Golden A and B in turn."""
    return load(request.param)


@pytest.fixture(scope="session")
def load_golden() -> Callable[[str], Golden]:
    """Golden A or B by name."""
    return load


@pytest.fixture(scope="session")
def settings() -> Callable[..., StepSettings]:
    """`settings(numerics, selection)` of a fresh prefill."""
    return settings_of
