"""A checkpoint from one form to the other: same values, same extras, same configuration, same tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from widemesh.model.checkpoint import storage
from widemesh.model.checkpoint.errors import CheckpointError
from widemesh.model.checkpoint.reader import Checkpoint
from widemesh.model.checkpoint.storage import Form
from widemesh.model.checkpoint.table import TensorSpec
from widemesh.model.checkpoint.writer import MAX_SHARD_BYTES, write_stored

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip

_CHUNK_VALUES = 1 << 26  # values dequantised at a time, 256 MiB in float32; rows per chunk are a multiple of 32


def convert_checkpoint(
    src: str | Path, dst: str | Path, form: Form, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the checkpoint `src` to the folder `dst` in `form`.

    Tensors that are stored in that form already, and extras (mtp.*, vision.*), pass through byte for byte. Plain to
    quantised rounds; a plain checkpoint that came from a quantised one gets its values back. config.json keeps every
    key. Raises CheckpointError for a bad `src` or a `dst` that already holds a checkpoint.
    """
    storage.check_form(form)
    checkpoint = Checkpoint.open(src)
    config_json = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    paths = (checkpoint.folder / name for name in TOKENIZER_FILES)
    write_stored(
        dst,
        config_json,
        _stored(checkpoint, form),
        copies=[path for path in paths if path.is_file()],
        max_shard_bytes=max_shard_bytes,
    )


def _stored(checkpoint: Checkpoint, form: Form) -> Iterator[tuple[str, np.ndarray]]:
    for spec in checkpoint.table.values():
        stored = checkpoint.raw(spec.name)
        if stored.dtype == storage.stored_dtype(spec.kind, form):
            yield spec.name, stored
            if storage.has_scale(stored.dtype):
                partner = storage.scale_name(spec.name)
                yield partner, checkpoint.raw(partner)
        elif form == "plain":
            yield spec.name, _dequantized(checkpoint, spec)
        elif spec.kind == "fp4" and spec.shape[-1] % 2:
            problem = f"{spec.name} has {spec.shape[-1]} columns, and FP4 packs two to a byte; keep it plain"
            raise CheckpointError(checkpoint.folder, [problem])
        else:
            yield from storage.encode(spec, checkpoint.read(spec.name), form)
    for name in checkpoint.extras:
        yield name, checkpoint.raw(name)


def _dequantized(checkpoint: Checkpoint, spec: TensorSpec) -> np.ndarray:
    """bfloat16 values, a few rows at a time, so that a table never exists in float32 as a whole."""
    rows, columns = spec.shape
    values = np.empty(spec.shape, storage.BF16)
    step = max(1, _CHUNK_VALUES // columns // storage.FP8_GROUP) * storage.FP8_GROUP
    for start in range(0, rows, step):
        values[start : start + step] = checkpoint.read(spec.name, start, start + step)
    return values
