"""What all processes of an engine must have in common, as short texts that can be compared and shown."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from importlib import metadata
from pathlib import Path

from widemesh import __version__
from widemesh.eplb import EplbConfig
from widemesh.model.checkpoint import Checkpoint
from widemesh.serving.config import PLACEMENT_FIELDS, EngineConfig

# Where a checkpoint lies, what it is called, and what bounds or seeds the requests of one process.
_OWN = frozenset(("model", "served_model_name", "seed", "max_num_queued_reqs", "max_num_queued_tokens",
                  "reserve_output_tokens"))  # fmt: skip
_SAMPLE_BYTES = 4096  # of each end of a file of weights; two sets of weights with the same shapes differ there


def job_digests(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """Versions, the settings that must agree by name, and hashes of the model's settings and of its weights.

    Of the weights, every tensor's name, type and shape count, and both ends of each file. Of placements of experts,
    the content of the file counts, wherever it lies.
    """
    fields: dict[str, str] = {}
    for field in dataclasses.fields(EngineConfig):
        value = getattr(config, field.name)
        if isinstance(value, EplbConfig):
            fields |= {f"{field.name}.{name}": str(one) for name, one in dataclasses.asdict(value).items()}
        elif field.name not in _OWN:
            fields[field.name] = str(value)
    for name in PLACEMENT_FIELDS:
        file = getattr(config, name)
        if file is not None:
            fields[name] = _hash(Path(file).read_bytes())
    return {
        "widemesh": __version__,
        "jax": metadata.version("jax"),
        **fields,
        "config.json": _hash(json.dumps(checkpoint.config.to_json(), sort_keys=True).encode()),
        "weights": _weights(checkpoint),
    }


def _weights(checkpoint: Checkpoint) -> str:
    parts, seen = [], set()
    for name, file in sorted(checkpoint.files.items()):
        entry = file.entries[name]
        parts.append(f"{name} {entry.dtype} {entry.shape}".encode())
        if file.path not in seen:
            seen.add(file.path)
            parts += [file.data[:_SAMPLE_BYTES].tobytes(), file.data[-_SAMPLE_BYTES:].tobytes()]
    return _hash(b"\n".join(parts))


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
