"""`widemesh bench exchange`: what spreading the experts over ranks saves, and what moving the rows to them costs."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from widemesh.model.config import ConfigError
from widemesh.model.presets import DEFAULT_PRESET, PRESETS
from widemesh.tools.init_tiny import TINY_PRESETS

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jax.stages import Wrapped

    from widemesh.sharding.exchange import Form, LayerShape

_LAYER = 0  # whose experts are timed; all are of the same shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """One exchange on one number of ranks."""

    ranks: int
    exchange: str
    expert_bytes_per_rank: int  # of all layers, from the placed arrays
    bytes_per_token: float  # sent between ranks in one layer, closed form
    counted_bytes_per_token: float  # from the compiled collectives, or from the routing
    ratio_to_local: float  # time of a layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeBench:
    """Spread a small model's experts over virtual CPU devices and count bytes: held, and moved by each exchange.

    The number of tokens stays the same, so does the work of the experts; all devices share the cores of one machine, so
    that time says what the exchange adds, not what more machines would save. On a CPU the ragged exchange runs as its
    stand-in. The last line printed is a JSON object: `rows`, one per exchange and number of ranks.
    """

    preset: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(TINY_PRESETS) + "}")] = DEFAULT_PRESET  # model sizes
    ranks: tuple[int, ...] = (1, 2, 4, 8)  # numbers of ranks, each with all exchanges
    tokens: int = 256  # rows of all ranks together
    repeat: int = 20  # timed runs of a layer
    batch_invariant: bool = False  # sum in order of experts
    seed: int = 0  # of weights, rows and routing

    def __post_init__(self) -> None:
        if self.preset not in TINY_PRESETS:
            raise ConfigError(f"preset={self.preset!r} is unknown; use one of {', '.join(TINY_PRESETS)}")
        for name in ("tokens", "repeat"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; use 1 or more")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative; use 0")
        if not self.ranks or min(self.ranks) < 1:
            raise ConfigError(f"ranks={self.ranks} must be numbers of at least 1; use 1 2 4 8")
        for ranks in self.ranks:
            if self.tokens % ranks:
                raise ConfigError(f"tokens={self.tokens} must be a multiple of ranks={ranks}; use a multiple of all")

    def run(self) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax

        from widemesh.sharding import MeshError, request_cpu_devices

        request_cpu_devices(max(self.ranks))
        if len(jax.devices()) < max(self.ranks):
            raise MeshError(f"ranks={max(self.ranks)} needs as many devices but JAX has started with "
                            f"{len(jax.devices())}; use fewer")  # fmt: skip
        rows = self._measure()
        table = Table(title=f"experts of {self.preset} over ranks, {self.tokens} tokens")
        for name in ("ranks", "exchange", "expert KiB per rank", "B/token, closed form", "B/token, counted",
                     "time / local"):  # fmt: skip
            table.add_column(name, justify="left" if name == "exchange" else "right")
        for row in rows:
            table.add_row(str(row.ranks), row.exchange, f"{row.expert_bytes_per_rank / 1024:,.0f}",
                          f"{row.bytes_per_token:,.0f}", f"{row.counted_bytes_per_token:,.0f}",
                          f"{row.ratio_to_local:.2f}")  # fmt: skip
        Console().print(table)
        figures = {"preset": self.preset, "tokens": self.tokens, "batch_invariant": self.batch_invariant}
        print(json.dumps(figures | {"rows": [dataclasses.asdict(row) for row in rows]}), flush=True)

    def _measure(self) -> list[_Row]:
        import jax
        import numpy as np

        from widemesh.sharding import make_mesh
        from widemesh.sharding.exchange import LayerShape, exchange_traffic

        config, rng = PRESETS[self.preset], np.random.default_rng(self.seed)
        t, k, d = self.tokens, config.num_experts_per_tok, config.hidden_size
        chosen = np.argsort(rng.uniform(size=(t, config.n_routed_experts)), axis=1)[:, :k].astype(np.int32)
        batch = (rng.normal(size=(t, d)).astype(np.float32), chosen, rng.uniform(size=(t, k)).astype(np.float32))

        alone = make_mesh(jax.devices()[:1])
        local = functools.partial(self._layer("local", alone), *batch, *self._experts(alone)[1])
        found = []
        for ranks in self.ranks:
            mesh = make_mesh(jax.devices()[:ranks])
            held, matrices = self._experts(mesh)
            shape = LayerShape(
                rows=t // ranks, per_token=k, hidden=d, value_bytes=4, ranks=ranks,
                slots=matrices[0].shape[0], batch_invariant=self.batch_invariant,
            )  # fmt: skip
            forms: tuple[Form, ...] = ("local",) if ranks == 1 else ("all_gather", "ragged")
            for form in forms:
                layer = self._layer(form, mesh)
                text = layer.lower(*batch, *matrices).compile().as_text() or ""
                local_s, seconds = self._in_turn(local, functools.partial(layer, *batch, *matrices))
                found.append(_Row(
                    ranks=ranks, exchange=form, expert_bytes_per_rank=held,
                    bytes_per_token=round(exchange_traffic(form, shape).total / shape.rows, 1),
                    counted_bytes_per_token=round(_counted(form, text, chosen, shape) / t, 1),
                    ratio_to_local=round(seconds / local_s, 2),
                ))  # fmt: skip
        return found

    def _in_turn(self, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
        """Median seconds of each, run in turn: whatever else the machine does meanwhile slows both."""
        import jax

        taken: tuple[list[float], list[float]] = ([], [])
        for turn in range(self.repeat + 1):
            for run, times in zip((first, second), taken, strict=True):
                start_s = time.perf_counter()
                jax.block_until_ready(run())
                if turn:  # the first one compiles
                    times.append(time.perf_counter() - start_s)
        return statistics.median(taken[0]), statistics.median(taken[1])

    def _experts(self, mesh: Mesh) -> tuple[int, list[Any]]:
        """Bytes of all layers' experts on the mesh's first device, and the matrices of one layer."""
        import numpy as np
        from flax import nnx

        from widemesh.eplb import initial_slot_owner
        from widemesh.model.checkpoint.table import tensor_table
        from widemesh.model.loading import place_parameters, read_parameters

        config, rng = PRESETS[self.preset], np.random.default_rng(self.seed)
        table = tensor_table(config)

        def draw(name: str) -> np.ndarray:
            shape = table[name].shape
            return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)

        owner = initial_slot_owner(config.n_routed_experts, mesh.devices.size)
        placed = nnx.to_flat_state(place_parameters(read_parameters(config, draw, owner), mesh))
        experts = {path: variable.get_value() for path, variable in placed if "experts" in path}
        held = sum(array.addressable_shards[0].data.nbytes for array in experts.values())
        return held, [experts["layers", _LAYER, "ffn", "experts", name] for name in ("w1", "w3", "w2")]

    def _layer(self, form: Form, mesh: Mesh) -> Wrapped:
        """(rows, slots, weights, w1, w3, w2) -> rows: the routed experts of one layer, between two exchanges."""
        import jax

        from widemesh.pallas_kernels.grouped_moe import ExpertMath, grouped_moe
        from widemesh.sharding import EP_AXIS, partition_spec
        from widemesh.sharding.exchange import make_exchange

        math = ExpertMath(limit=PRESETS[self.preset].swiglu_limit)
        exchange = make_exchange(form, axis=EP_AXIS, platform="cpu", batch_invariant=self.batch_invariant)

        def layer(x: Any, slots: Any, weights: Any, w1: Any, w3: Any, w2: Any) -> Any:
            sent = exchange.dispatch(x, slots, weights, w1.shape[0], slots)
            return exchange.combine(grouped_moe(sent.x, sent.slots, sent.weights, w1, w3, w2, math), sent)

        spec = partition_spec(("expert",))
        return jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec, check_vma=False))


def _counted(form: Form, program: str, chosen: Any, shape: LayerShape) -> float:
    """Bytes that all ranks send in one layer."""
    from widemesh.pallas_kernels.gpu.hlo import Program
    from widemesh.sharding.exchange import routed_ragged_traffic

    if form == "ragged":
        return float(routed_ragged_traffic(chosen.reshape(shape.ranks, shape.rows, -1), shape).sent.sum())
    # A collective's larger side is all ranks' parts: each goes to all ranks but its own.
    return float(sum(one.num_bytes for one in Program(program).collectives()) * (shape.ranks - 1))
