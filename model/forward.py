"""Running the model over whole token lists on one device: every position's hidden state or logits.

For research, checks and the `logits` command. It runs the same modules as the serving engine, exactly: no bounded
replay, no reuse between lists. Lists are run one at a time, padded to a bucket; the padding is never seen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from widemesh.model.cache import DEFAULT_PAGE_SIZE, Cache, init_cache, page_layout, private_pages
from widemesh.model.checkpoint import Checkpoint
from widemesh.model.config import ConfigError, ModelConfig
from widemesh.model.engram_hash import EngramHash
from widemesh.model.loading import load_parameters, split_model
from widemesh.model.numerics import Numerics
from widemesh.model.rope import RopeTables
from widemesh.model.step import DictRecorder, Recorder, Rows, StepContext, StepSettings, selection_form
from widemesh.model.token_map import build_token_map
from widemesh.model.tokenizer_files import load_tokenizer

_SMALLEST_BUCKET = 16


class TokenError(ConfigError):
    """A token list that cannot be run. The message names the list, the value and the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """How a list is fed: whole, or `chunk` ids at a time through the caches (incremental = 1)."""

    chunk: int | None = None

    @classmethod
    def parse(cls, text: str) -> Mode:
        """`full`, `incremental` or `chunked:N`. Raises ConfigError for anything else."""
        if text == "full":
            return cls()
        if text == "incremental":
            return cls(chunk=1)
        kind, _, size = text.partition(":")
        if kind == "chunked" and size.isdecimal() and int(size) >= 1:
            return cls(chunk=int(size))
        raise ConfigError(f"mode={text!r} is unknown; use full, incremental or chunked:N with N of at least 1")


class ForwardModel:
    """A loaded model on one device.

    `logits` and `hidden` take any list of token ids; programs are compiled per padded length and kept.
    """

    def __init__(
        self, config: ModelConfig, parameters: nnx.State[Any, Any], engram_hash: EngramHash, numerics: Numerics,
        page_size: int = DEFAULT_PAGE_SIZE,
    ):  # fmt: skip
        if page_size < 1 or page_size % config.max_ratio:
            raise ConfigError(f"page_size={page_size} must be a multiple of the largest compress ratio; use "
                              f"{config.max_ratio} or a multiple of it")
        self.config, self.numerics, self.engram_hash, self.page_size = config, numerics, engram_hash, page_size
        self.parameters = jax.tree.map(jnp.asarray, parameters)
        # Flattened once: taking a state of modules apart is about 3 ms of Python, in every call.
        self._leaves, self._form = jax.tree.flatten(self.parameters)
        self.graph, _ = split_model(config, numerics)

    @classmethod
    def load(
        cls, folder: str | Path, numerics: Numerics, page_size: int = DEFAULT_PAGE_SIZE
    ) -> ForwardModel:
        """Read a checkpoint folder, tokenizer included (the Engram hash needs its vocabulary).

        `page_size` is in tokens, a multiple of the model's compress ratios; it changes no result.
        """
        checkpoint = Checkpoint.open(folder)
        config = checkpoint.config
        owner = np.arange(config.n_routed_experts)
        parameters = load_parameters(config, numerics, owner, checkpoint.read, checkpoint.stored)
        return cls(config, parameters, load_engram_hash(config, folder), numerics, page_size)

    def logits(self, token_ids: Sequence[int] | np.ndarray, mode: Mode = Mode()) -> Float[np.ndarray, "S V"]:
        """f32 logits of every position. Ids are used as given. Raises TokenError for ids that cannot be run."""
        return self._run(token_ids, mode, "logits")

    def hidden(self, token_ids: Sequence[int] | np.ndarray, mode: Mode = Mode()) -> Float[np.ndarray, "S D"]:
        """Final normed hidden state of every position."""
        return self._run(token_ids, mode, "hidden")

    def intermediates(self, token_ids: Int32[np.ndarray, "B S"], settings: StepSettings) -> dict[str, np.ndarray]:
        """Every recorded intermediate of a full forward over equally long lists, and `logits`."""
        batch, length = token_ids.shape
        rows = _device_rows(token_ids, np.zeros(batch, np.int32), np.full(batch, length, np.int32),
                            self.engram_hash.rows(token_ids))  # fmt: skip
        recorder = DictRecorder()

        @jax.jit
        def run(parameters: nnx.State[Any, Any], cache: Cache, rows: Rows, rope: RopeTables) -> dict[str, Array]:
            logits, _ = self._step(parameters, cache, rows, rope, settings, "logits", recorder)
            return {**recorder.values, "logits": logits}

        values = run(self.parameters, self.new_cache(batch, length), rows, RopeTables.build(self.config, length))
        return {name: np.asarray(value, np.float32 if value.dtype == jnp.bfloat16 else None)
                for name, value in values.items()}  # fmt: skip

    def new_cache(self, slots: int, max_len: int) -> Cache:
        """Empty state of `slots` requests of up to `max_len` tokens, each with pages of its own."""
        return self._empty_cache(slots, max_len)()

    def _run(
        self, token_ids: Sequence[int] | np.ndarray, mode: Mode, output: Literal["logits", "hidden"]
    ) -> Float[np.ndarray, "S O"]:
        ids = check_token_ids(token_ids, self.config)
        bucket = max(_SMALLEST_BUCKET, 1 << (len(ids) - 1).bit_length())
        chunk = min(mode.chunk or bucket, bucket)
        program = self._program(chunk, bucket, output)
        rope = self._rope(bucket)
        cache = self.new_cache(1, bucket)
        history_len = self.engram_hash.history_len
        before = np.concatenate([np.full(history_len, -1, np.int32), ids])
        outputs = []
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            padded = np.zeros((1, chunk), np.int32)
            padded[0, : len(part)] = part
            rows = _device_rows(
                padded, np.array([start], np.int32), np.array([len(part)], np.int32),
                self.engram_hash.rows(padded, before[None, start : start + history_len]),
            )  # fmt: skip
            values, cache = program(self._leaves, cache, rows, rope)
            outputs.append(np.asarray(values)[0, : len(part)])
        return np.concatenate(outputs)

    @functools.cache  # noqa: B019 - lives as long as the model does, by design
    def _rope(self, positions: int) -> RopeTables:
        return jax.tree.map(jnp.asarray, RopeTables.build(self.config, positions))

    @functools.cache  # noqa: B019
    def _empty_cache(self, slots: int, max_len: int) -> Callable[[], Cache]:
        """One program for all its arrays, which made one by one take 5 ms."""
        pages = -(-max_len // self.page_size)
        layout = page_layout(self.config, self.numerics, self.page_size)
        return jax.jit(
            lambda: private_pages(
                init_cache(self.config, layout, slots=slots, pages=1 + slots * pages, table_pages=pages)
            )
        )

    @functools.cache  # noqa: B019
    def _program(self, rows: int, max_len: int, output: Literal["logits", "hidden"]) -> Callable[..., Any]:
        settings = StepSettings(
            numerics=self.numerics,
            selection=selection_form(rows, self.numerics),
            start_bound=max_len - rows,
        )

        def run(leaves: list[Array], cache: Cache, rows: Rows, rope: RopeTables) -> tuple[Array, Cache]:
            parameters = jax.tree.unflatten(self._form, leaves)
            return self._step(parameters, cache, rows, rope, settings, output, Recorder())

        return jax.jit(run, donate_argnums=1)

    def _step(
        self,
        parameters: nnx.State[Any, Any],
        cache: Cache,
        rows: Rows,
        rope: RopeTables,
        settings: StepSettings,
        output: Literal["logits", "hidden"],
        recorder: Recorder,
    ) -> tuple[Float[Array, "B S O"], Cache]:
        model = nnx.merge(self.graph, parameters)
        step = StepContext(rows, rope, settings, recorder)
        hidden, cache = model(cache, step)
        return (model.logits(hidden, step) if output == "logits" else hidden), cache


def _device_rows(*arrays: np.ndarray) -> Rows:
    """Rows from fresh host arrays, which nobody writes to again."""
    return Rows.of(*map(jnp.asarray, arrays))


def load_engram_hash(config: ModelConfig, folder: str | Path) -> EngramHash:
    """The hash of a checkpoint folder's tokenizer. Raises CheckpointError or ConfigError when they do not fit."""
    if not config.engram_layer_ids:
        return EngramHash.build(config, np.zeros(config.vocab_size, np.int32))
    return EngramHash.build(config, build_token_map(load_tokenizer(folder)))


def check_token_ids(
    token_ids: Sequence[int] | np.ndarray, config: ModelConfig, name: str = "token_ids"
) -> Int32[np.ndarray, "S"]:
    """One int32 array of valid ids. Raises TokenError for an empty list, a non-integer, or an id out of range."""
    try:
        ids = np.asarray(token_ids)
    except ValueError:  # lists of different lengths
        raise TokenError(f"{name} must be one flat list of integers") from None
    if ids.size == 0:
        raise TokenError(f"{name}=[] is empty; give at least one id")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TokenError(f"{name} must be one flat list of integers, not {ids.dtype} of shape {ids.shape}")
    bad = (ids < 0) | (ids >= config.vocab_size)
    if bad.any():
        place, last = int(bad.argmax()), config.vocab_size - 1
        raise TokenError(f"{name}[{place}]={int(ids[place])} is outside the vocabulary; use 0 to {last}")
    if (ids == config.image_token_id).any():
        raise TokenError(f"{name} holds {config.image_token_id}, the image placeholder; images are not supported")
    if ids.size > config.max_position_embeddings:
        raise TokenError(
            f"{name} has {ids.size} ids but max_position_embeddings={config.max_position_embeddings}; give fewer"
        )
    return ids.astype(np.int32)
