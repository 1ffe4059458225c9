"""widemesh: serve DeepSeek-V4.1-Flash, and smaller models of its architecture, from JAX.

    engine = Engine(EngineConfig(model="folder"))
    completions = engine.generate(["a prompt"], SamplingParams(max_tokens=16))

Names are imported on first use: `Engine` and `ForwardModel` bring jax, whose environment may still want setting.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_PUBLIC = {
    "Engine": "widemesh.serving.engine",  # serves prompts with a prefill mesh and a decode mesh
    "EngineConfig": "widemesh.serving.config",
    "EngineError": "widemesh.serving.engine",
    "SamplingParams": "widemesh.serving.request",
    "Completion": "widemesh.serving.request",
    "Delta": "widemesh.serving.request",
    "FinishReason": "widemesh.serving.request",
    "RequestError": "widemesh.serving.request",
    "ForwardModel": "widemesh.model.forward",  # logits and hidden states of whole lists, for research
    "ModelConfig": "widemesh.model.config",
    "ConfigError": "widemesh.model.config",
    "CheckpointError": "widemesh.model.checkpoint",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
