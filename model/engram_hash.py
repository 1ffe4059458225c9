"""Which Engram table rows a token reads: exact 64-bit hashes of the 2-, 3-, ... n-grams that end at it.

Everything depends on token ids alone, so rows can be computed, and fetched, before the step that uses them starts.
Formulas and constants: docs/model.md, "Engram".
"""

from __future__ import annotations

import dataclasses
from math import isqrt

import numpy as np
from jaxtyping import Bool, Int32, Int64

from widemesh.model.config import ConfigError, ModelConfig

_MULTIPLIER_SEED = 10007  # times the layer's index: the seed of that layer's multipliers
_MAX_INT64 = 2**63 - 1
_MAX_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EngramHash:
    """Hash constants of all Engram layers, in the order of `engram_layer_ids`. Columns are (n-gram size, head).

    Build one with `EngramHash.build`, which checks it against the configuration; numpy only.
    """

    token_map: Int32[np.ndarray, " V"]  # token id -> compressed id
    primes: Int64[np.ndarray, "L columns"]  # buckets of each column
    offsets: Int64[np.ndarray, "L columns"]  # first table row of each column
    multipliers: Int64[np.ndarray, "L n"]  # one odd factor per token of the longest n-gram, newest first
    pad_compressed_id: int  # stands for whatever lies before the start or beyond a DEAD token

    @classmethod
    def build(cls, config: ModelConfig, token_map: Int32[np.ndarray, " V"]) -> EngramHash:
        """The constants for `config` over the compressed map of its tokenizer.

        Raises ConfigError where the map does not cover the vocabulary, its size is not
        `engram_compressed_vocab_size`, or the primes do not add up to `engram_num_embeddings`: in each case every row
        would be silently wrong.
        """
        if config.engram_layer_ids:
            _check_token_map(config, token_map)
        primes = engram_primes(config)
        totals = primes.sum(axis=1)
        if totals.tolist() != list(config.engram_num_embeddings):
            raise ConfigError(f"engram_num_embeddings={list(config.engram_num_embeddings)} must be {totals.tolist()}, "
                              f"the sums of the primes that follow engram_vocab_size={config.engram_vocab_size}; "
                              "correct config.json")
        if (totals > _MAX_INT32).any():
            raise ConfigError(f"engram_num_embeddings={totals.tolist()} must fit 32-bit row numbers; "
                              "use smaller tables")
        return cls(
            token_map=np.asarray(token_map, np.int32),
            primes=primes,
            offsets=np.cumsum(primes, axis=1) - primes,
            multipliers=_multipliers(config),
            pad_compressed_id=int(token_map[config.engram_pad_token_id]) if config.engram_layer_ids else 0,
        )

    @property
    def history_len(self) -> int:
        """Tokens before the first that its longest n-gram still reads."""
        return self.multipliers.shape[1] - 1

    def rows(self, token_ids: Int32[np.ndarray, "B S"], history: Int32[np.ndarray, "B h"] | None = None,
             dead: Bool[np.ndarray, "B S"] | None = None) -> Int32[np.ndarray, "B S L columns"]:
        """Table rows, offsets included, that each position of `token_ids` reads.

        `history` holds the `history_len` ids just before, oldest first; None means the sequence starts here. `dead`
        marks positions that are no text (image spans). A negative id, in either array, is DEAD too and stands for
        "before the start". From a DEAD token on backwards an n-gram reads the pad id only; a DEAD position reads
        nothing but pad. Other ids must lie within the vocabulary. Raises ValueError for a history of another shape.
        """
        batch, length = token_ids.shape
        if history is None:
            history = np.full((batch, self.history_len), -1, np.int32)
        if history.shape != (batch, self.history_len):
            raise ValueError(f"history has shape {history.shape}; give [batch, history_len] = "
                             f"{(batch, self.history_len)}, filled with -1 before the start")
        ids = np.concatenate([history, token_ids], axis=1)
        is_dead = ids < 0
        if dead is not None:
            is_dead[:, self.history_len:] |= dead
        compressed = self.token_map[np.where(is_dead, 0, ids)].astype(np.int64)

        num_layers, num_columns = self.primes.shape
        heads = num_columns // self.history_len
        rows = np.empty((batch, length, num_layers, num_columns), np.int32)
        is_cut = np.zeros((batch, length), bool)  # a DEAD token was met on the way back
        mixed = np.zeros((batch, length, num_layers), np.int64)
        for back in range(self.history_len + 1):
            start = self.history_len - back
            is_cut |= is_dead[:, start:start + length]
            token = np.where(is_cut, self.pad_compressed_id, compressed[:, start:start + length])
            mixed ^= token[:, :, None] * self.multipliers[:, back]
            if back > 0:
                columns = slice((back - 1) * heads, back * heads)
                rows[..., columns] = mixed[..., None] % self.primes[:, columns] + self.offsets[:, columns]
        return rows


def engram_primes(config: ModelConfig) -> Int64[np.ndarray, "L columns"]:
    """Buckets per column: the primes from `engram_vocab_size` on, in order, none used twice in any layer."""
    if config.engram_layer_ids and config.engram_max_ngram_size < 2:
        raise ConfigError(f"engram_max_ngram_size={config.engram_max_ngram_size} must be at least 2; "
                          "correct config.json")
    shape = len(config.engram_layer_ids), config.num_engram_columns
    found: list[int] = []
    candidate = config.engram_vocab_size
    while len(found) < shape[0] * shape[1]:
        if _is_prime(candidate):
            found.append(candidate)
        candidate += 1
    return np.array(found, np.int64).reshape(shape)


def _is_prime(number: int) -> bool:
    """Trial division: a few thousand steps at the released 16 million, for 48 primes in all."""
    if number < 4:
        return number >= 2
    return number % 2 == 1 and all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))


def _multipliers(config: ModelConfig) -> Int64[np.ndarray, "L n"]:
    """Odd factors small enough that (compressed id) x (factor) never leaves the positive 64-bit range."""
    bound = max(1, _MAX_INT64 // max(1, config.engram_compressed_vocab_size) // 2)
    shape = len(config.engram_layer_ids), config.engram_max_ngram_size
    drawn = [np.random.default_rng(_MULTIPLIER_SEED * layer).integers(0, bound, size=shape[1], dtype=np.int64)
             for layer in config.engram_layer_ids]
    return np.array(drawn, np.int64).reshape(shape) * 2 + 1


def _check_token_map(config: ModelConfig, token_map: np.ndarray) -> None:
    if token_map.ndim != 1 or len(token_map) < config.vocab_size:
        raise ConfigError(f"the tokenizer names {token_map.shape[0]} ids, vocab_size={config.vocab_size}; "
                          "use the tokenizer.json that belongs to this checkpoint")
    size = int(token_map.max()) + 1
    if size != config.engram_compressed_vocab_size:
        raise ConfigError(f"engram_compressed_vocab_size={config.engram_compressed_vocab_size} but the tokenizer's "
                          f"compressed map has {size} ids; use the tokenizer.json that belongs to this checkpoint")
    if not 0 <= config.engram_pad_token_id < len(token_map):
        raise ConfigError(f"engram_pad_token_id={config.engram_pad_token_id} must be a token id below "
                          f"{len(token_map)}; correct config.json")
