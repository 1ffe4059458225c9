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
from widemesh.serving.expert_models import TARGET, expert_layouts
from widemesh.serving.scheduling.config import SchedulerConfig
from widemesh.serving.scheduling.replay import ReplayConfig
from widemesh.serving.tensor_split import check_split

# By name, so that reading settings does not import jax; `widemesh.model.numerics` holds what they mean.
NUMERICS_NAMES = ("plain", "kvq", "w8a8", "reference", "serving")
EXCHANGES = ("auto", "all_gather", "ragged")
PLACEMENT_FIELDS = ("expert_placement", "draft_expert_placement")  # of the target and of the draft
MOST_TIMEOUT_S = 60.0  # JAX's own watch over a job, which ends processes with an abort, must be slower than ours


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to serve, on how many devices, with which limits. Wrong values raise ConfigError at construction."""

    model: str = ""  # checkpoint folder
    served_model_name: str | None = None  # name that clients see; None: the folder
    numerics: str = "kvq"  # plain, kvq, w8a8, reference or serving
    max_model_len: int = 1024  # most tokens of a request, prompt and output together
    max_num_seqs: int = 8  # requests decoded together, over all decode ranks
    # rows of one prefill step, over all prefill ranks; with replay_tail=bounded at least the model's window for each
    max_num_batched_tokens: int = 256
    page_size: int = 64  # tokens per page of compressed KV; a multiple of the model's compress ratios
    num_pages: int | None = None  # pages of each decode rank's pool, the null page included; None: for all its slots
    num_prefill_pages: int | None = None  # likewise of each prefill rank; None: four of the longest requests
    replay_prefix: Literal["bounded", "exact"] = "bounded"  # rows run again behind a cached prefix
    replay_tail: Literal["bounded", "full"] = "bounded"  # rows of the later layers in a prefill: one window, or all
    decode_steps: int = 1  # tokens of a request that one decode dispatch draws; more pay off for few users
    # drafts that a decode step tries for each request, at most the model's dspark_block_size; 0: no draft is loaded
    num_speculative_tokens: int = 0
    reserve_output_tokens: int = 8192  # most output tokens for which pages are set aside at admission
    max_new_kv_loads_per_step: int = 4  # prefilled requests that may join the decode batch in one step; 0 = all
    max_num_queued_reqs: int | None = None  # waiting requests beyond which new ones are refused
    max_num_queued_tokens: int | None = None  # their tokens, likewise
    prefill_devices: int = 2  # size of the prefill mesh
    decode_devices: int = 4  # size of the decode mesh
    tensor_parallel_size: int = 1  # devices of a rank, which share its heads, FFN width and vocabulary; on both meshes
    exchange: Literal["auto", "all_gather", "ragged"] = "auto"  # how rows reach experts; auto: by bytes and device
    batch_invariant: bool = False  # sum a row's experts in their own order, whatever rank holds them
    enable_eplb: bool = False  # count what the experts of the decode mesh are sent, and move them while serving
    eplb: EplbConfig = EplbConfig()  # when, and how many copies of experts there are
    draft_eplb: EplbConfig = EplbConfig()  # likewise of the draft's experts, which are moved on their own
    # file of the placement that the decode mesh starts with, as `widemesh experts export` writes it; None: expert e in
    # slot e
    expert_placement: str | None = None
    draft_expert_placement: str | None = None  # likewise of the draft's experts
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
        for name, eplb in (("eplb", self.eplb), ("draft_eplb", self.draft_eplb)):
            if eplb.num_redundant_experts and not self.enable_eplb:
                raise ConfigError(f"{name}.num_redundant_experts={eplb.num_redundant_experts} needs enable_eplb; set "
                                  "it, or use 0")  # fmt: skip
        if self.num_speculative_tokens < 0:
            raise ConfigError(f"num_speculative_tokens={self.num_speculative_tokens} must not be negative; use 0 to "
                              "leave the draft out")  # fmt: skip
        if not self.num_speculative_tokens:
            self._check_no_draft()
        if self.num_speculative_tokens and self.decode_steps > 1:
            raise ConfigError(f"decode_steps={self.decode_steps} cannot be used with num_speculative_tokens="
                              f"{self.num_speculative_tokens}; use decode_steps=1")  # fmt: skip
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
        model = model.with_draft(self.num_speculative_tokens)
        feeds = min((role.layer for role in model.roles if role.feeds_draft), default=model.replay_cut)
        if self.replay_tail == "bounded" and feeds < model.replay_cut:
            raise ConfigError(f"replay_tail='bounded' cannot be used with a draft that reads layer {feeds}, which lies "
                              f"below layer {model.replay_cut}; use replay_tail='full'")  # fmt: skip
        self._check_expert_ranks("n_routed_experts", model.n_routed_experts)
        if model.num_speculative_tokens:
            self._check_expert_ranks("dspark_n_routed_experts", model.dspark_n_routed_experts)
        layouts = self.expert_layouts(model)
        for place, layout in enumerate(layouts):
            if self.enable_eplb:
                check_slice_rows(self.eplb_of(place).slice_rows, layout, ("", "draft_eplb.")[place])
            self.placement(layout, place)

    def expert_layouts(self, model: ModelConfig) -> tuple[ExpertLayout, ...]:
        """The expert slots of the decode mesh, of the target and of the draft that the model is built with, if any.

        Raises ConfigError if they do not suit the model and the ranks.
        """
        return expert_layouts(model, (self.eplb, self.draft_eplb), self.decode_ranks)

    def placement(self, layout: ExpertLayout, model: int = TARGET) -> Int32[np.ndarray, "L X"] | None:
        """The expert of each slot that a model (by its place) is to start with; None: no file was given for it.

        Raises ConfigError.
        """
        name = PLACEMENT_FIELDS[model]
        file = getattr(self, name)
        if file is None:
            return None
        try:
            return read_placement(Path(file), layout)
        except OSError as err:
            raise ConfigError(f"{name}={file} cannot be read ({err.strerror}); use a file made by `widemesh experts "
                              "export`") from None  # fmt: skip

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
        longest = -(-(self.max_model_len + self.decode_rows) // self.page_size)
        return SchedulerConfig(
            page_size=self.page_size,
            max_model_len=self.max_model_len,
            prefill_ranks=self.prefill_ranks,
            prefill_pages=1 + 4 * longest if self.num_prefill_pages is None else self.num_prefill_pages,
            max_num_batched_tokens=self.max_num_batched_tokens,
            decode_ranks=self.decode_ranks,
            max_num_seqs=self.max_num_seqs,
            decode_rows=self.decode_rows,
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
    def decode_rows(self) -> int:
        """Most rows of a request in one decode dispatch."""
        return self.decode_steps * (1 + self.num_speculative_tokens)

    @property
    def load_windows(self) -> tuple[int, int]:
        """Steps of expert load that the decode mesh keeps, of the target and of the draft."""
        if not self.enable_eplb:
            return 0, 0
        return self.eplb.window_size, self.draft_eplb.window_size

    def eplb_of(self, model: int) -> EplbConfig:
        """Of a model by its place (`expert_models`)."""
        return (self.eplb, self.draft_eplb)[model]

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

    def _check_no_draft(self) -> None:
        """Refuse what only a draft could have."""
        redundant, file = self.draft_eplb.num_redundant_experts, self.draft_expert_placement
        if redundant:
            raise ConfigError(f"draft_eplb.num_redundant_experts={redundant} needs a draft; set "
                              "num_speculative_tokens, or use 0")  # fmt: skip
        if file is not None:
            raise ConfigError(f"draft_expert_placement={file} needs a draft; set num_speculative_tokens, or leave it "
                              "out")  # fmt: skip

    def _check_expert_ranks(self, name: str, experts: int) -> None:
        """Every rank must hold as many experts; on a decode mesh with redundant ones its layout counts."""
        for devices, ranks in (("prefill_devices", self.prefill_ranks), ("decode_devices", self.decode_ranks)):
            is_counted = self.enable_eplb and devices == "decode_devices"
            if experts % ranks and not is_counted:
                near = [str(n * self.tensor_parallel_size) for n in nearest_divisors(experts, ranks)]
                raise ConfigError(f"{self._rank_words(devices)} must divide the model's {name}={experts}; "
                                  f"use {devices}={' or '.join(near)}")  # fmt: skip

    def _rank_words(self, devices: str) -> str:
        """The number of ranks as the settings give it."""
        if self.tensor_parallel_size == 1:
            return f"{devices}={getattr(self, devices)}"
        return f"{devices}={getattr(self, devices)} / tensor_parallel_size={self.tensor_parallel_size}"


def check_slice_rows(rows: int, layout: ExpertLayout, group: str = "") -> None:
    """Refuse slices that are larger than a layer: more would never move, only take memory.

    Raises ConfigError; `group` is what the name of the setting begins with.
    """
    if rows > layout.slots_per_rank:
        raise ConfigError(f"{group}slice_rows={rows} is more than the {layout.slots_per_rank} expert slots that a rank "
                          f"has in a layer; use 1 to {layout.slots_per_rank}")  # fmt: skip
