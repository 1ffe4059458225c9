"""`widemesh bench replay`: a prefill in chunks, with all rows in all layers and with the bounded tail, in one run."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from widemesh.model.config import ConfigError
from widemesh.model.presets import DEFAULT_PRESET, PRESETS
from widemesh.serving.config import NUMERICS_NAMES
from widemesh.tools.init_tiny import TINY_PRESETS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """Time one prompt's prefill with and without the bounded tail, random weights of a small preset."""

    preset: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(TINY_PRESETS) + "}")] = DEFAULT_PRESET  # model sizes
    tokens: int = 2048  # of the prompt
    chunk: int = 256  # rows of a step
    repeat: int = 5  # prefills of each kind, taken in turn
    numerics: str = "kvq"  # plain, kvq, w8a8, reference or serving

    def __post_init__(self) -> None:
        if self.preset not in TINY_PRESETS:
            raise ConfigError(f"preset={self.preset!r} is unknown; use one of {', '.join(TINY_PRESETS)}")
        if self.tokens < 1:
            raise ConfigError(f"tokens={self.tokens} must be at least 1; use 2048")
        if self.numerics not in NUMERICS_NAMES:
            raise ConfigError(f"numerics={self.numerics!r} is unknown; use one of {', '.join(NUMERICS_NAMES)}")
        if self.chunk < 1 or self.tokens % self.chunk:
            raise ConfigError(f"tokens={self.tokens} must be a multiple of chunk={self.chunk}; use whole chunks")
        if self.repeat < 1:
            raise ConfigError(f"repeat={self.repeat} must be at least 1; use 1 or more")
        config = PRESETS[self.preset]
        if not config.sliding_window <= self.chunk:
            raise ConfigError(f"chunk={self.chunk} must hold the window of {config.sliding_window} rows; use that")
        if self.tokens > config.max_position_embeddings:
            raise ConfigError(f"tokens={self.tokens} exceeds the preset's {config.max_position_embeddings}; use fewer")

    def run(self) -> None:
        whole, bounded = self._prefills()
        seconds: dict[str, list[float]] = {"all rows": [], "bounded tail": []}
        for turn in range(self.repeat + 1):
            for name, prefill in (("all rows", whole), ("bounded tail", bounded)):
                start_s = time.perf_counter()
                prefill()
                if turn:  # the first one compiles
                    seconds[name].append(time.perf_counter() - start_s)
        full_s, tail_s = (statistics.median(seconds[name]) for name in seconds)
        config = PRESETS[self.preset]
        cut, depth, window = config.replay_cut, config.num_hidden_layers, config.sliding_window
        table = Table(title=f"{self.tokens} tokens in chunks of {self.chunk}, {self.preset}")
        for name in ("", "rows below the cut", "rows above it", "ms", "tokens/s"):
            table.add_column(name, justify="left" if not name else "right")
        for name, above, spent_s in (("all rows", self.tokens, full_s), ("bounded tail", window, tail_s)):
            table.add_row(name, f"{self.tokens} x {cut}", f"{above} x {depth - cut}", f"{spent_s * 1e3:.1f}",
                          f"{self.tokens / spent_s:.0f}")  # fmt: skip
        Console().print(table)
        rows = {"full": self.tokens * depth, "bounded": self.tokens * cut + window * (depth - cut)}
        print(json.dumps({
            "tokens": self.tokens, "full_tokens_per_s": round(self.tokens / full_s, 1),
            "bounded_tokens_per_s": round(self.tokens / tail_s, 1), "ratio": round(full_s / tail_s, 3),
            "layer_rows_full": rows["full"], "layer_rows_bounded": rows["bounded"],
            "layer_rows_ratio": round(rows["full"] / rows["bounded"], 3),
        }))  # fmt: skip

    def _prefills(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        import functools

        import jax
        import jax.numpy as jnp
        import numpy as np
        from flax import nnx

        from widemesh.model.engram_hash import EngramHash
        from widemesh.model.forward import ForwardModel
        from widemesh.model.loading import read_parameters
        from widemesh.model.numerics import numerics_named
        from widemesh.model.random_weights import random_tensors
        from widemesh.model.rope import RopeTables
        from widemesh.model.step import Rows, StepContext, StepSettings, selection_form
        from widemesh.model.tiny_tokenizer import tiny_tokenizer
        from widemesh.model.token_map import build_token_map

        config, numerics = PRESETS[self.preset], numerics_named(self.numerics)
        parameters = read_parameters(
            config, dict(random_tensors(config, 0)).__getitem__, np.arange(config.n_routed_experts)
        )
        hash_ = EngramHash.build(config, build_token_map(tiny_tokenizer(config)[0]))
        model = ForwardModel(config, parameters, hash_, numerics)
        ids = np.random.default_rng(0).integers(3, config.vocab_size - 8, (1, self.tokens)).astype(np.int32)
        engram = hash_.rows(ids)
        rope = jax.tree.map(jnp.asarray, RopeTables.build(config, self.tokens))
        chunks = [
            Rows.of(*(jnp.asarray(x) for x in (ids[:, begin : begin + self.chunk], np.array([begin], np.int32),
                                               np.array([self.chunk], np.int32),
                                               engram[:, begin : begin + self.chunk])))
            for begin in range(0, self.tokens, self.chunk)
        ]  # fmt: skip

        def context(rows: Rows, count: int) -> StepContext:
            form = selection_form(count, numerics)
            settings = StepSettings(numerics=numerics, selection=form, start_bound=self.tokens - self.chunk)
            return StepContext(rows, rope, settings)

        @functools.partial(jax.jit, donate_argnums=1)
        def full(parameters: Any, cache: Any, rows: Rows) -> Any:
            return nnx.merge(model.graph, parameters)(cache, context(rows, self.chunk))[1]

        @functools.partial(jax.jit, donate_argnums=1)
        def encode(parameters: Any, cache: Any, rows: Rows) -> Any:
            return nnx.merge(model.graph, parameters).encode(cache, context(rows, self.chunk))

        @functools.partial(jax.jit, donate_argnums=1)
        def tail(parameters: Any, cache: Any, boundary: Any, rows: Rows) -> Any:
            boundary, rows = boundary.last_rows(rows, config.sliding_window)
            step = context(rows, self.chunk)  # the form of selection that the boundary has
            return nnx.merge(model.graph, parameters).tail(boundary, cache, step)[1]

        def whole() -> None:
            cache = model.new_cache(1, self.tokens)
            for rows in chunks:
                cache = full(model.parameters, cache, rows)
            jax.block_until_ready(cache)

        def bounded() -> None:
            cache, boundary = model.new_cache(1, self.tokens), None
            for rows in chunks:
                boundary, cache = encode(model.parameters, cache, rows)
            jax.block_until_ready(tail(model.parameters, cache, boundary, chunks[-1]))

        return whole, bounded
