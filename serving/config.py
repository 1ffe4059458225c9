"""Settings of the engine. Fields that vLLM has carry vLLM's names; the command line's flags are made from them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int32

from widemesh.eplb.config import EplbConfig
from widemesh.eplb.layout import ExpertLayout, nearest_divisors
from widemesh.eplb.placement_file import read_placement
from widemesh.model.config import ConfigError, ModelConfig
from widemesh.serving.scheduling.config import SchedulerConfig
from widemesh.serving.scheduling.replay import ReplayConfig
from widemesh.serving.tensor_split import check_split

# By name, so that reading settings does not import jax; `widemesh.model.numerics` holds what they mean.
NUMERICS_NAMES = ("plain", "kvq", "w8a8", "reference", "serving")
EXCHANGES = ("auto", "all_gather", "ragged")
MOST_TIMEOUT_S = 60.0  # JAX's own watch over a job, which ends processes with an abort, must be slower than ours


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to serve, on how many devices, with which limits. Wrong values raise ConfigError at construction."""

    model: str = ""  # checkpoint folder
    served_model_name: str | None = None  # name that clients see; None: the folder
    numerics: str = "kvq"  # plain, kvq, w8a8, reference or serving
    max_model_len: int = 1024  # most tokens of a request, prompt and output together
    max_num_seqs: int = 8  # requests decoded together, over all decode ranks
    max_num_batched_tokens: int = 256  # rows of one prefill step, over all prefill ranks
    page_size: int = 64  # tokens per page of compressed KV; a multiple of the model's compress ratios
    num_pages: int | None = None  # pages of each decode rank's pool, the null page included; None: for all its slots
    num_prefill_pages: int | None = None  # likewise of each prefill rank; None: four of the longest requests
    replay_prefix: Literal["bounded", "exact"] = "bounded"  # rows run again behind a cached prefix
    replay_tail: Literal["bounded", "full"] = "bounded"  # rows of the later layers in a prefill: one window, or all
    decode_steps: int = 1  # tokens of a request that one decode dispatch draws; more pay off for few users
    reserve_output_tokens: int = 8192  # most output tokens for which pages are set aside at admission
    max_new_kv_loads_per_step: int = 4  # prefilled requests that may join the decode batch in one step; 0 = all
    max_num_queued_reqs: int | None = None  # waiting requests beyond which new ones are refused
    max_num_queued_tokens: int | None = None  # their prompt tokens, likewise
    prefill_devices: int = 2  # size of the prefill mesh
    decode_devices: int = 4  # size of the decode mesh
    tensor_parallel_size: int = 1  # devices of a rank, which share its heads, FFN width and vocabulary; on both meshes
    exchange: Literal["auto", "all_gather", "ragged"] = "auto"  # how rows reach experts; auto: by bytes and device
    batch_invariant: bool = False  # sum a row's experts in their own order, whatever rank holds them
    enable_eplb: bool = False  # count what the experts of the decode mesh are sent, and move them while serving
    eplb: EplbConfig = EplbConfig()  # when, and how many copies of experts there are
    # file of the placement that the decode mesh starts with, as `widemesh experts export` writes it; None: expert e in
    # slot e
    expert_placement: str | None = None
    ticket_timeout_s: float = 5.0  # seconds that a process may keep the others waiting before the job is given up
    seed: int | None = None  # of the seeds drawn for requests that bring none; None: from the operating system

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "decode_steps", "prefill_devices",
                     "decode_devices", "tensor_parallel_size"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1; use 1 or more")
        if not 0.5 <= self.ticket_timeout_s <= MOST_TIMEOUT_S:
            raise ConfigError(f"ticket_timeout_s={self.ticket_timeout_s:g} must be between 0.5 and {MOST_TIMEOUT_S:g}; "
                              "use 5")  # fmt: skip
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative; use 0 or more, or leave it out")
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len={self.max_model_len} must be at least 2: a prompt token and an output")
        for name in ("prefill_devices", "decode_devices"):
            if getattr(self, name) % self.tensor_parallel_size:
                wanted = -(-getattr(self, name) // self.tensor_parallel_size) * self.tensor_parallel_size
                raise ConfigError(f"{name}={getattr(self, name)} must be a multiple of tensor_parallel_size="
                                  f"{self.tensor_parallel_size}; use {wanted}")  # fmt: skip
        ranks, each = self.decode_ranks, self._rank_words("decode_devices")
        if self.max_num_seqs % ranks:
            raise ConfigError(f"max_num_seqs={self.max_num_seqs} must be a multiple of {each}; use "
                              f"{-(-self.max_num_seqs // ranks) * ranks}")  # fmt: skip
        if self.max_num_batched_tokens < self.prefill_ranks:
            raise ConfigError(f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                              f"{self._rank_words('prefill_devices')}; use {self.prefill_ranks} or more")  # fmt: skip
        if self.numerics not in NUMERICS_NAMES:
            raise ConfigError(f"numerics={self.numerics!r} is unknown; use one of {', '.join(NUMERICS_NAMES)}")
        if self.exchange not in EXCHANGES:
            raise ConfigError(f"exchange={self.exchange!r} is unknown; use one of {', '.join(EXCHANGES)}")
        if self.eplb.num_redundant_experts and not self.enable_eplb:
            raise ConfigError(f"num_redundant_experts={self.eplb.num_redundant_experts} needs enable_eplb; set it, or "
                              "use 0")  # fmt: skip
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
        check_split(model, self.tensor_parallel_size, self.numerics)
        self._check_expert_ranks(model.n_routed_experts)
        layout = self.expert_layout(model)
        if self.enable_eplb:
            check_slice_rows(self.eplb.slice_rows, layout)
        self.placement(layout)

    def expert_layout(self, model: ModelConfig) -> ExpertLayout:
        """The expert slots of the decode mesh. Raises ConfigError if they do not suit the model and the ranks."""
        return self.eplb.layout(
            num_layers=model.num_hidden_layers, num_experts=model.n_routed_experts, ranks=self.decode_ranks
        )

    def placement(self, layout: ExpertLayout) -> Int32[np.ndarray, "L X"] | None:
        """The expert of each slot that `expert_placement` names, None without one. Raises ConfigError."""
        if self.expert_placement is None:
            return None
        try:
            return read_placement(Path(self.expert_placement), layout)
        except OSError as err:
            raise ConfigError(f"expert_placement={self.expert_placement} cannot be read ({err.strerror}); use a file "
                              "made by `widemesh experts export`") from None  # fmt: skip

    def share(self, num_processes: int) -> EngineConfig:
        """What one of so many processes has of it: its devices, their slots and rows. Raises ConfigError."""
        devices = []
        for name in ("prefill_devices", "decode_devices"):
            total, unit = getattr(self, name), num_processes * self.tensor_parallel_size
            if total % unit:
                whole = "" if self.tensor_parallel_size == 1 else f" * tensor_parallel_size={self.tensor_parallel_size}"
                raise ConfigError(f"{name}={total} must be a multiple of num_processes={num_processes}{whole}; use "
                                  f"{-(-total // unit) * unit}")  # fmt: skip
            devices.append(total // num_processes)
        return dataclasses.replace(
            self, prefill_devices=devices[0], decode_devices=devices[1],
            max_num_seqs=self.max_num_seqs // num_processes,
            max_num_batched_tokens=self.chunk_rows * self.prefill_ranks // num_processes,
        )  # fmt: skip

    @property
    def scheduler(self) -> SchedulerConfig:
        """The part of it that the scheduler needs. Raises ConfigError for values that do not go together."""
        longest = -(-(self.max_model_len + self.decode_steps) // self.page_size)
        return SchedulerConfig(
            page_size=self.page_size,
            max_model_len=self.max_model_len,
            prefill_ranks=self.prefill_ranks,
            prefill_pages=1 + 4 * longest if self.num_prefill_pages is None else self.num_prefill_pages,
            max_num_batched_tokens=self.max_num_batched_tokens,
            decode_ranks=self.decode_ranks,
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
    def load_window(self) -> int:
        """Steps of expert load that the decode mesh keeps."""
        return self.eplb.window_size if self.enable_eplb else 0

    @property
    def prefill_ranks(self) -> int:
        """Ranks of the prefill mesh: devices, or groups of `tensor_parallel_size` devices."""
        return self.prefill_devices // self.tensor_parallel_size

    @property
    def decode_ranks(self) -> int:
        """Ranks of the decode mesh, likewise."""
        return self.decode_devices // self.tensor_parallel_size

    @property
    def slots_per_rank(self) -> int:
        """Requests decoded by each decode rank."""
        return self.max_num_seqs // self.decode_ranks

    @property
    def chunk_rows(self) -> int:
        """Rows of one request in one prefill step: each prefill rank works on a request of its own."""
        return self.max_num_batched_tokens // self.prefill_ranks

    def _check_expert_ranks(self, experts: int) -> None:
        """Every rank must hold as many experts; on a decode mesh with redundant ones its layout counts."""
        for devices, ranks in (("prefill_devices", self.prefill_ranks), ("decode_devices", self.decode_ranks)):
            is_counted = self.enable_eplb and devices == "decode_devices"
            if experts % ranks and not is_counted:
                near = [str(n * self.tensor_parallel_size) for n in nearest_divisors(experts, ranks)]
                raise ConfigError(f"{self._rank_words(devices)} must divide the model's n_routed_experts={experts}; "
                                  f"use {devices}={' or '.join(near)}")  # fmt: skip

    def _rank_words(self, devices: str) -> str:
        """The number of ranks as the settings give it."""
        if self.tensor_parallel_size == 1:
            return f"{devices}={getattr(self, devices)}"
        return f"{devices}={getattr(self, devices)} / tensor_parallel_size={self.tensor_parallel_size}"


def check_slice_rows(rows: int, layout: ExpertLayout) -> None:
    """Refuse slices that are larger than a layer: more would never move, only take memory. Raises ConfigError."""
    if rows > layout.slots_per_rank:
        raise ConfigError(f"slice_rows={rows} is more than the {layout.slots_per_rank} expert slots that a rank has in "
                          f"a layer; use 1 to {layout.slots_per_rank}")  # fmt: skip
