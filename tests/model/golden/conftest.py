"""The golden checkpoints, and their layers run one at a time with the golden values as input.

Golden A and B are small random models with every feature of the architecture; their intermediates and logits were
made by a public PyTorch implementation. `oracle.py` holds the model's formulas once more, in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from widemesh.model.block import Block
from widemesh.model.cache import Cache, init_cache, page_layout, private_pages
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.checkpoint.tensor_file import TensorFile
from widemesh.model.config import LayerRole, ModelConfig
from widemesh.model.engram_hash import EngramHash
from widemesh.model.forward import load_engram_hash
from widemesh.model.loading import read_parameters, split_model
from widemesh.model.numerics import NUMERICS, Numerics
from widemesh.model.rope import RopeTables
from widemesh.model.shared import Shared
from widemesh.model.step import DictRecorder, Rows, StepContext, StepSettings
from widemesh.pallas_kernels.paged_cache import write_source
from widemesh.pallas_kernels.sparse_attention import SelectedIndices, SelectedMask, Selection


def _load(name: str) -> Any:
    """A module beside this file; tests are imported without a path of their own."""
    spec = importlib.util.spec_from_file_location(f"widemesh_test_{name}", Path(__file__).parent / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


oracle = _load("oracle")

FOLDER = Path(__file__).parents[2] / "golden"
INPUTS = ("long", "batch", "short")

# Relative L2 per row. The golden logits themselves move by 3e-6 when every linear and norm carries noise of 2e-7.
TENSOR_TOLERANCE = 2e-5
# Absolute. An error of one Sinkhorn iteration, or a missing epsilon, is too small to show anywhere else.
COMB_TOLERANCE = 5e-6
MIX_TOLERANCE = 1e-6

Records = dict[str, np.ndarray]
Entering = tuple[Any, Any, Shared]  # streams, pre-mix and shared state

PAGE_SIZE = 4  # tokens; small, so that every list has several pages


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


def row_errors(name: str, found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """How far each row of an intermediate is from the golden one, in units of what is allowed.

    Choices (entries, candidates, experts) must be equal: 0 or infinity.
    """
    if name.endswith("topk_indices"):
        pairs = zip(selected_sets(found), selected_sets(wanted), strict=True)
        return np.array([0.0 if own == golden else np.inf for own, golden in pairs])
    if found.shape != wanted.shape:
        return np.full(1, np.inf)
    if name.endswith(("candidates", "topk_ids")):
        return np.where((found == wanted).all(axis=-1), 0.0, np.inf).reshape(-1)
    if name.endswith(("_hc.pre", "_hc.post", "pre_out")):
        return np.max(np.abs(found - wanted), axis=-1).reshape(-1) / MIX_TOLERANCE
    if name.endswith("_hc.comb"):
        return np.max(np.abs(found - wanted), axis=(-1, -2)).reshape(-1) / COMB_TOLERANCE
    same = (np.isinf(found) == np.isinf(wanted)).all(axis=-1)  # scores of what is out of sight
    found, wanted = (np.where(np.isinf(x), 0, x) for x in (found, wanted))
    errors = np.where(same, relative(found, wanted) / TENSOR_TOLERANCE, np.inf)
    return np.where(np.isnan(errors), np.inf, errors).reshape(-1)


class Golden:
    """One golden checkpoint, loaded, with its inputs and outputs."""

    def __init__(self, name: str):
        self.name, self.folder = name, FOLDER / name
        checkpoint = Checkpoint.open(self.folder)
        self.config: ModelConfig = checkpoint.config
        self.read = functools.cache(checkpoint.read)
        self.hash = load_engram_hash(self.config, self.folder)
        self.graph, _ = split_model(self.config)
        state = read_parameters(self.config, self.read, np.arange(self.config.n_routed_experts))
        self.parameters: nnx.State[Any, Any] = jax.tree.map(jnp.asarray, state)
        self.inputs = read_file(self.folder / "inputs.safetensors")
        self.outputs = {mode: read_file(self.folder / f"outputs_{mode}_long.safetensors") for mode in ("plain", "kvq")}
        self.other = read_file(self.folder / "outputs_other.safetensors")
        self.draft = read_file(self.folder / "dspark.safetensors")
        self.length = self.inputs["long"].shape[1]
        self.rope = jax.tree.map(jnp.asarray, RopeTables.build(self.config, self.length))
        self.depth = self.config.num_hidden_layers

    def wanted(self, mode: str, which: str, name: str) -> np.ndarray:
        """A golden output of one input, [B, S, ...]."""
        if which == "long" and mode in self.outputs:
            return self.outputs[mode][name]
        return self.other[f"{mode}.{which}.{name}"]

    def layer_outputs(self, layer: int, mode: str = "plain") -> Records:
        """Golden intermediates of one layer on `long`, by their names within the layer; the last one's end the model.

        `pre_out` is what the layer hands to the next: the pre-mix of its second site.
        """
        prefix, outputs = f"layers.{layer}.", self.outputs[mode]
        found = {k.removeprefix(prefix): v for k, v in outputs.items() if k.startswith(prefix)}
        found["pre_out"] = found["ffn_hc.pre"]
        if layer == self.depth - 1:
            found |= {k: v for k, v in outputs.items() if k.startswith("final.") or k == "logits"}
        return found

    # --- running -----------------------------------------------------------------------------------------------------

    def run(
        self, ids: np.ndarray, settings: StepSettings, *, forced: str | None = None, as_it_is: bool = False
    ) -> Records:
        """Everything that all layers record, and `logits`, for one list of ids.

        With `forced` (the mode of golden values, on `long`) each layer is fed the golden values of what enters it, so
        that its own error shows and no other's. `as_it_is` compiles the code as it is at this moment, for a test that
        has changed it.
        """
        rows = self.rows(ids)
        entering = [self.entering(layer, forced or "plain", settings) for layer in range(1, self.depth + 1)]
        program = self._program.__wrapped__(self, settings) if as_it_is else self._program(settings)
        values = program(self.parameters, entering, forced is not None, rows)
        return {name: cut(name, value, len(ids)) for name, value in as_records(values).items()}

    def run_layer(
        self, layer: int, settings: StepSettings, *, mode: str = "plain", config: ModelConfig | None = None,
        role: LayerRole | None = None, rope: RopeTables | None = None, hash_: EngramHash | None = None,
        jit: bool = False,
    ) -> Records:
        """One layer on `long`, fed golden values: the code as it is at this moment.

        After the last layer come the final collapse, norm and head. Without `jit` it runs operation by operation,
        which costs less for a single run once the operations are compiled.
        """  # fmt: skip
        config, role = config or self.config, role or self.config.roles[layer]
        graph, _ = nnx.split(Block(config, role))

        def run(parameters: Any, streams: Any, pre: Any, shared: Any, rows: Rows, rope: RopeTables) -> dict[str, Any]:
            recorder = DictRecorder()
            step = StepContext(rows, rope, settings, recorder)
            cache = self.new_cache(settings, config).layers[layer]
            block = nnx.merge(graph, parameters["layers"][layer])
            streams, pre, *_ = block(streams, pre, cache, shared, step)
            recorder.values["pre_out"] = pre
            if layer == self.depth - 1:
                model = nnx.merge(self.graph, parameters)
                recorder.values["logits"] = model.logits(model.leave(streams, pre, step), step)
            return recorder.values

        streams, pre, shared = self.entering(layer, mode, settings)
        rows = self.rows(self.inputs["long"][0], hash_)
        rope = self.rope if rope is None else jax.tree.map(jnp.asarray, rope)
        streams = streams.astype(settings.numerics.dtype)
        return as_records((jax.jit(run) if jit else run)(self.parameters, streams, pre, shared, rows, rope))

    def rows(self, ids: np.ndarray, hash_: EngramHash | None = None) -> Rows:
        """A fresh request of these ids, padded to the length of `long`."""
        tokens = np.zeros((1, self.length), np.int32)
        tokens[0, : len(ids)] = ids
        return Rows.of(
            jnp.asarray(tokens), jnp.zeros(1, jnp.int32), jnp.array([len(ids)], jnp.int32),
            jnp.asarray((hash_ or self.hash).rows(tokens)),
        )  # fmt: skip

    def new_cache(self, settings: StepSettings, config: ModelConfig | None = None) -> Cache:
        """Empty state of one request as long as `long`."""
        config, pages = config or self.config, -(-self.length // PAGE_SIZE)
        layout = page_layout(config, settings.numerics, PAGE_SIZE)
        return private_pages(init_cache(config, layout, slots=1, pages=1 + pages, table_pages=pages))

    @functools.cache  # noqa: B019 - one object per checkpoint and process
    def entering(self, layer: int, mode: str, settings: StepSettings) -> Entering:
        """Golden values that enter a layer on `long`; the layer past the last one is the final collapse."""
        outputs, roles = self.outputs[mode], self.config.roles[:layer]
        if layer == 0:
            embedded = self.parameters["embed"]["weight"].get_value()[self.inputs["long"]]
            streams = jnp.repeat(embedded[:, :, None], self.config.hc_mult, axis=2)
            pre = jnp.broadcast_to(jnp.eye(1, self.config.hc_mult)[0], streams.shape[:3])
            return streams, pre, self.nothing_shared(settings)
        streams, pre = (outputs[f"layers.{layer - 1}.{name}"] for name in ("streams_out", "ffn_hc.pre"))
        owners = [role.layer for role in roles if role.owns_kv]
        if not owners:
            return jnp.asarray(streams), jnp.asarray(pre), self.nothing_shared(settings)
        chooser = max(role.layer for role in roles if role.owns_index)
        entries, keys = (outputs[f"layers.{owners[-1]}.attn.{name}"] for name in ("compressed_kv", "index_keys"))
        cache = self.new_cache(settings)
        layout = cache.layout.sources[len(owners) - 1]
        room = cache.table.shape[1] * layout.rows
        index = jnp.arange(entries.shape[1], dtype=jnp.int32)[None]
        pages = write_source(cache.pages, cache.table, index, index >= 0, jnp.asarray(entries), jnp.asarray(keys),
                             layout)  # fmt: skip
        candidates = np.ones((1, self.length, room), bool)
        if 0 <= self.config.candidate_source_layer_id < layer:
            known = outputs[f"layers.{self.config.candidate_source_layer_id}.attn.candidates"].astype(bool)
            candidates = pad_entries(known, room)
        shared = dataclasses.replace(
            self.nothing_shared(settings),
            pages=pages,
            index_keys=jnp.asarray(pad_entries(keys, room, axis=1)),
            selection=selection_of(outputs[f"layers.{chooser}.attn.topk_indices"], room, settings.selection),
            candidates=jnp.asarray(candidates),
        )
        if settings.selection == "mask":
            shared = dataclasses.replace(shared, entries=jnp.asarray(pad_entries(entries, room, axis=1)))
        return jnp.asarray(streams), jnp.asarray(pre), shared

    def nothing_shared(self, settings: StepSettings) -> Shared:
        """What enters the first layer."""
        step = StepContext(self.rows(self.inputs["long"][0]), self.rope, settings)
        return Shared.start(self.new_cache(settings), self.config, step)

    @functools.cache  # noqa: B019
    def _program(self, settings: StepSettings) -> Callable[..., dict[str, Any]]:
        """The model's own layers in their own order, each after a choice between golden and computed input."""

        def run(parameters: Any, entering: list[Any], forced: Any, rows: Rows) -> dict[str, Any]:
            model, recorder = nnx.merge(self.graph, parameters), DictRecorder()
            step = StepContext(rows, self.rope, settings, recorder)
            cache = self.new_cache(settings)
            state: Entering = (*model.enter(step), Shared.start(cache, self.config, step))
            for layer, block in enumerate(model.layers):
                streams, pre, _, shared = block(*state[:2], cache.layers[layer], state[2], step.at(f"layers.{layer}"))
                recorder.values[f"layers.{layer}.pre_out"] = pre
                state = jax.tree.map(
                    lambda golden, own: jnp.where(forced, golden.astype(own.dtype), own),
                    entering[layer], (streams, pre, shared),
                )  # fmt: skip
            logits = model.logits(model.leave(*state[:2], step), step)
            return {**recorder.values, "logits": logits}

        return jax.jit(run)

    # --- comparison --------------------------------------------------------------------------------------------------

    def errors(self, found: Records, wanted: Records) -> dict[str, np.ndarray]:
        """`row_errors` of every wanted intermediate; all of them must have been recorded."""
        errors = {}
        for name, value in wanted.items():
            mask = name.replace("topk_indices", "topk_mask")
            own = found[mask if mask in found else name]
            if name.endswith(("compressed_kv", "index_keys")):
                own = own[:, : value.shape[1]]  # a step has room for one group more than it may complete
            if name.endswith(("indexer_scores", "candidates")):  # pages have room for more entries: none is in sight
                own, beyond = np.split(own, [value.shape[-1]], axis=-1)
                assert not beyond.any() if beyond.dtype == bool else (beyond == -np.inf).all()
            errors[name] = row_errors(name, own, value)
        return errors

    def oracle_layer(self, layer: int, numerics: Numerics, mode: str, skip: str | None = None) -> Records:
        """What the float64 oracle makes of one layer of `long` when golden values of `mode` enter, [S, ...] each."""
        streams, pre, shared = self.entering(layer, mode, settings_of("plain", "indices"))
        streams = np.asarray(streams[0].astype(numerics.dtype), np.float64)
        parts = None
        owners = [role.layer for role in self.config.roles[:layer] if role.owns_kv]
        if owners:
            selected = [row[row >= 0] for row in np.asarray(shared.selection.indices)[0]]
            own = f"layers.{owners[-1]}.attn."
            entries, keys = (self.outputs[mode][own + name] for name in ("compressed_kv", "index_keys"))
            parts = oracle.Shared(
                *(np.asarray(x[0], np.float64) for x in (entries, keys)), selected,
                np.asarray(shared.candidates[0, :, : entries.shape[1]]),
            )  # fmt: skip
        model = self.oracle(numerics, skip)
        model.layer(layer, streams, np.asarray(pre[0], np.float64), parts, self.hash.rows(self.inputs["long"])[0])
        return {name.removeprefix(f"layers.{layer}."): value for name, value in model.records.items()}

    def oracle(self, numerics: Numerics, skip: str | None = None) -> oracle.Oracle:
        """The oracle on this checkpoint."""
        return oracle.Oracle(self.config, self.read, numerics, skip=skip)


def settings_of(numerics: str | Numerics, selection: str) -> StepSettings:
    """Settings of a fresh prefill."""
    numerics = NUMERICS[numerics] if isinstance(numerics, str) else numerics
    return StepSettings(numerics=numerics, selection=selection, start_bound=0)  # type: ignore[arg-type]


def pad_entries(known: np.ndarray, entries: int, axis: int = -1) -> np.ndarray:
    """Zeros (or False) for the entries that a table has room for and the golden list does not reach."""
    widths = [(0, 0)] * known.ndim
    widths[axis] = (0, entries - known.shape[axis])
    return np.pad(known, widths)


def selection_of(indices: np.ndarray, entries: int, form: str) -> Selection:
    """A golden selection in the form that a program uses."""
    if form == "indices":
        return SelectedIndices(jnp.asarray(np.sort(indices, axis=-1)))
    mask = np.zeros((*indices.shape[:2], entries + 1), bool)
    np.put_along_axis(mask, np.where(indices < 0, entries, indices).astype(np.int64), True, axis=-1)
    return SelectedMask(jnp.asarray(mask[..., :entries]))


def as_records(values: dict[str, Any]) -> Records:
    """Host copies, bfloat16 as float32."""
    return {k: np.asarray(v, np.float32 if v.dtype == jnp.bfloat16 else None) for k, v in values.items()}


def cut(name: str, value: np.ndarray, rows: int) -> np.ndarray:
    """The rows that are no padding; what is per entry or per expert, not per row, is left whole."""
    if name.endswith(("compressed_kv", "index_keys", ".load")):
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


@pytest.fixture(scope="session")
def distance() -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Relative L2 distance along the last axis."""
    return relative


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`point` stands for every named rounding of the oracle."""
    if "point" in metafunc.fixturenames:
        points = [(group, point) for group, points in oracle.ROUNDING_POINTS.items() for point in points]
        metafunc.parametrize(("group", "point"), points)
