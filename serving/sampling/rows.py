"""Sampling settings of a step as arrays. All are always present, so that no mix of requests is a new program.

B slots, V vocabulary, W words of a token mask.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from widemesh.serving.limits import MAX_LOGIT_BIASES, MAX_STOP_IDS

NO_ID = -1  # padding of id lists


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """Settings per slot; one that is off has its neutral value. They change only when a request joins or leaves."""

    temperature: Float[Array, "B"]  # 0 = greedy
    top_k: Int32[Array, "B"]  # 0 = off
    top_p: Float[Array, "B"]  # 1 = off
    min_p: Float[Array, "B"]  # 0 = off
    seed: UInt32[Array, "B"]
    repetition_penalty: Float[Array, "B"]  # 1 = off
    frequency_penalty: Float[Array, "B"]  # 0 = off
    presence_penalty: Float[Array, "B"]  # 0 = off
    bias_ids: Int32[Array, "B biases"]  # NO_ID = none
    bias_values: Float[Array, "B biases"]
    stop_ids: Int32[Array, "B stops"]  # NO_ID = none; only read before `first_stop`
    first_stop: Int32[Array, "B"]  # lowest position at which a stop id may stand; 0 = any
    logprobs: Int32[Array, "B"]  # how many of the most likely tokens to report beside the chosen; -1 = nothing

    @staticmethod
    def neutral(slots: int) -> SamplingRows:
        """Host arrays that say greedy, and nothing else."""
        values: dict[str, Any] = {
            "temperature": np.zeros(slots, np.float32),
            "top_k": np.zeros(slots, np.int32),
            "top_p": np.ones(slots, np.float32),
            "min_p": np.zeros(slots, np.float32),
            "seed": np.zeros(slots, np.uint32),
            "repetition_penalty": np.ones(slots, np.float32),
            "frequency_penalty": np.zeros(slots, np.float32),
            "presence_penalty": np.zeros(slots, np.float32),
            "bias_ids": np.full((slots, MAX_LOGIT_BIASES), NO_ID, np.int32),
            "bias_values": np.zeros((slots, MAX_LOGIT_BIASES), np.float32),
            "stop_ids": np.full((slots, MAX_STOP_IDS), NO_ID, np.int32),
            "first_stop": np.zeros(slots, np.int32),
            "logprobs": np.full(slots, -1, np.int32),
        }
        return SamplingRows(**values)


def mask_words(vocab: int) -> int:
    """32-bit words of a token mask; token i is bit i % 32 of word i // 32."""
    return -(-vocab // 32)


def full_mask(slots: int, vocab: int) -> UInt32[np.ndarray, "B W"]:
    """The mask that allows everything."""
    return np.full((slots, mask_words(vocab)), 0xFFFFFFFF, np.uint32)


def unpack_mask(mask: UInt32[Array, "B W"], vocab: int) -> Bool[Array, "B V"]:
    """One value per token."""
    bits = (mask[:, :, None] >> lax.broadcasted_iota(jnp.uint32, (1, 1, 32), 2)) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab].astype(bool)
