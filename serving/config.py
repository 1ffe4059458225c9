"""Settings of the engine. Fields that vLLM has carry vLLM's names; the command line's flags are made from them."""

from __future__ import annotations

import dataclasses

from widemesh.model.config import ConfigError

# By name, so that reading settings does not import jax; `widemesh.model.numerics` holds what they mean.
NUMERICS_NAMES = ("plain", "kvq", "w8a8", "reference")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to serve, on how many devices, with which limits. Wrong values raise ConfigError at construction."""

    model: str = ""  # checkpoint folder
    served_model_name: str | None = None  # name that clients see; None: the folder
    numerics: str = "kvq"  # plain, kvq, w8a8 or reference
    max_model_len: int = 1024  # most tokens of a request, prompt and output together
    max_num_seqs: int = 8  # requests decoded together, over all decode devices
    max_num_batched_tokens: int = 256  # rows of one prefill step, over all prefill devices
    prefill_devices: int = 2  # size of the prefill mesh
    decode_devices: int = 4  # size of the decode mesh
    seed: int | None = None  # of the seeds drawn for requests that bring none; None: from the operating system

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_devices", "decode_devices"):
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

    @property
    def slots_per_rank(self) -> int:
        """Requests decoded by each decode device."""
        return self.max_num_seqs // self.decode_devices

    @property
    def chunk_rows(self) -> int:
        """Rows of one request in one prefill step: each prefill device works on a request of its own."""
        return self.max_num_batched_tokens // self.prefill_devices
