"""Settings of the engine. Fields that vLLM has carry vLLM's names; the command line's flags are made from them."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from widemesh.model.config import ConfigError, ModelConfig
from widemesh.serving.scheduling.config import SchedulerConfig
from widemesh.serving.scheduling.replay import ReplayConfig

# By name, so that reading settings does not import jax; `widemesh.model.numerics` holds what they mean.
NUMERICS_NAMES = ("plain", "kvq", "w8a8", "reference", "serving")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to serve, on how many devices, with which limits. Wrong values raise ConfigError at construction."""

    model: str = ""  # checkpoint folder
    served_model_name: str | None = None  # name that clients see; None: the folder
    numerics: str = "kvq"  # plain, kvq, w8a8, reference or serving
    max_model_len: int = 1024  # most tokens of a request, prompt and output together
    max_num_seqs: int = 8  # requests decoded together, over all decode devices
    max_num_batched_tokens: int = 256  # rows of one prefill step, over all prefill devices
    page_size: int = 64  # tokens per page of compressed KV; a multiple of the model's compress ratios
    num_pages: int | None = None  # pages of each decode device's pool, the null page included; None: for all its slots
    num_prefill_pages: int | None = None  # likewise of each prefill device; None: four of the longest requests
    replay_prefix: Literal["bounded", "exact"] = "bounded"  # rows run again behind a cached prefix
    replay_tail: Literal["bounded", "full"] = "bounded"  # rows of the later layers in a prefill: one window, or all
    decode_steps: int = 1  # tokens of a request that one decode dispatch draws; more pay off for few users
    reserve_output_tokens: int = 8192  # most output tokens for which pages are set aside at admission
    max_new_kv_loads_per_step: int = 4  # prefilled requests that may join the decode batch in one step; 0 = all
    max_num_queued_reqs: int | None = None  # waiting requests beyond which new ones are refused
    max_num_queued_tokens: int | None = None  # their prompt tokens, likewise
    prefill_devices: int = 2  # size of the prefill mesh
    decode_devices: int = 4  # size of the decode mesh
    seed: int | None = None  # of the seeds drawn for requests that bring none; None: from the operating system

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "decode_steps", "prefill_devices",
                     "decode_devices"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; use 1 or more")
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative; use 0 or more, or leave it out")
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len={self.max_model_len} must be at least 2: a prompt token and an output")
        if self.max_num_seqs % self.decode_devices:
            raise ConfigError(f"max_num_seqs={self.max_num_seqs} must be a multiple of decode_devices="
                              f"{self.decode_devices}; use {-(-self.max_num_seqs // self.decode_devices) * self.decode_devices}")  # fmt: skip # noqa: E501
        if self.max_num_batched_tokens < self.prefill_devices:
            raise ConfigError(f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                              f"prefill_devices={self.prefill_devices}")
        if self.numerics not in NUMERICS_NAMES:
            raise ConfigError(f"numerics={self.numerics!r} is unknown; use one of {', '.join(NUMERICS_NAMES)}")
        self.scheduler, self.replay  # noqa: B018 - they check their own fields

    def check_model(self, model: ModelConfig) -> None:
        """Refuse settings that this model cannot be served with. Raises ConfigError."""
        if self.max_model_len > model.max_position_embeddings:
            raise ConfigError(f"max_model_len={self.max_model_len} exceeds the model's max_position_embeddings="
                              f"{model.max_position_embeddings}; use at most that")  # fmt: skip
        ratio = math.lcm(*(model.roles[layer].ratio for layer in model.kv_source_layers))
        if self.page_size % ratio:
            raise ConfigError(f"page_size={self.page_size} must hold whole groups of every compress ratio; "
                              f"use a multiple of {ratio}")  # fmt: skip
        engram = max(model.engram_layer_ids, default=0)
        if self.replay_tail == "bounded" and engram > model.replay_cut:
            raise ConfigError(f"replay_tail='bounded' cannot be used with this model, whose Engram layer {engram} lies "
                              f"above layer {model.replay_cut}; use replay_tail='full'")

    @property
    def scheduler(self) -> SchedulerConfig:
        """The part of it that the scheduler needs. Raises ConfigError for values that do not go together."""
        longest = -(-(self.max_model_len + self.decode_steps) // self.page_size)
        return SchedulerConfig(
            page_size=self.page_size,
            max_model_len=self.max_model_len,
            prefill_ranks=self.prefill_devices,
            prefill_pages=1 + 4 * longest if self.num_prefill_pages is None else self.num_prefill_pages,
            max_num_batched_tokens=self.max_num_batched_tokens,
            decode_ranks=self.decode_devices,
            max_num_seqs=self.max_num_seqs,
            decode_rows=self.decode_steps,
            decode_pages=1 + self.slots_per_rank * longest if self.num_pages is None else self.num_pages,
            reserve_output_tokens=self.reserve_output_tokens,
            max_new_kv_loads_per_step=self.max_new_kv_loads_per_step,
            max_num_queued_reqs=self.max_num_queued_reqs,
            max_num_queued_tokens=self.max_num_queued_tokens,
        )

    @property
    def replay(self) -> ReplayConfig:
        """How much a prefill runs again."""
        return ReplayConfig(prefix=self.replay_prefix, tail=self.replay_tail)

    @property
    def slots_per_rank(self) -> int:
        """Requests decoded by each decode device."""
        return self.max_num_seqs // self.decode_devices

    @property
    def chunk_rows(self) -> int:
        """Rows of one request in one prefill step: each prefill device works on a request of its own."""
        return self.max_num_batched_tokens // self.prefill_devices
