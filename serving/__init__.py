"""The serving engine: requests, scheduling, step programs, sampling, transfer and the gRPC service."""

from widemesh.serving.config import EngineConfig
from widemesh.serving.process_config import ProcessConfig
from widemesh.serving.request import (
    Completion,
    Delta,
    FinishReason,
    RequestError,
    SamplingParams,
    Status,
    TokenLogprobs,
)

__all__ = ["Completion", "Delta", "Engine", "EngineConfig", "EngineError", "FinishReason", "ProcessConfig",
           "RequestError", "SamplingParams", "Status", "TokenLogprobs"]  # fmt: skip


def __getattr__(name: str) -> object:
    """Engine and EngineError on first use: they import jax, whose environment a caller may still want to set."""
    if name in ("Engine", "EngineError"):
        from widemesh.serving import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
