"""Writing a checkpoint folder in the released layout, plain or quantised.

Files are written under `.partial` names; the weights get their own names when all of them are whole, and config.json
comes last. A folder whose writing was interrupted therefore has no config.json and cannot be taken for a checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from widemesh.model.checkpoint import storage
from widemesh.model.checkpoint.errors import CheckpointError
from widemesh.model.checkpoint.reader import INDEX_FILE, SINGLE_FILE
from widemesh.model.checkpoint.storage import Form
from widemesh.model.checkpoint.table import TensorSpec, tensor_table
from widemesh.model.checkpoint.tensor_file import NAMES, write_tensor_file
from widemesh.model.config import ModelConfig

MAX_SHARD_BYTES = 4 << 30

_PARTIAL = ".partial"


def write_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    form: Form,
    extras: Iterable[tuple[str, np.ndarray]] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `tensors`, (released name, logical values) of the whole backbone in any order, and config.json.

    Plain stores bfloat16 (float32 where the release does), quantised the released FP8 and FP4; values are rounded to
    nearest even. `extras` are stored as they come. Both iterables are consumed once; at most one shard of
    `max_shard_bytes` (or one larger tensor) is held in memory. The folder is made if need be and may hold other files.

    Raises CheckpointError when the folder holds a checkpoint already, or when tensors are missing, unknown, given
    twice or of another shape than config makes them; then no checkpoint is left behind.
    """
    storage.check_form(form)
    stored = _encoded(Path(folder), tensor_table(config), tensors, form)
    write_stored(folder, config.to_json(), itertools.chain(stored, extras), max_shard_bytes=max_shard_bytes)


def write_stored(
    folder: str | Path,
    config_json: Mapping[str, object],
    stored: Iterable[tuple[str, np.ndarray]],
    *,
    copies: Iterable[Path] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write tensors that have their stored dtypes already, with this config.json and `copies` of other files.

    Checks no tensor's presence. Raises CheckpointError like `write_checkpoint`. After any error, files that this call
    has made are gone.
    """
    folder = Path(folder)
    with _reporting(folder):
        _make_empty(folder)
    shards: list[list[str]] = []
    made = [INDEX_FILE, "config.json"]
    made += [name + _PARTIAL for name in made]
    try:
        total_bytes = _write_shards(folder, stored, max_shard_bytes, shards)
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        if len(shards) == 1:
            names = [SINGLE_FILE]
        with _reporting(folder):
            for path in copies:
                if not (folder / path.name).exists():
                    made.append(path.name)
                shutil.copyfile(path, folder / path.name)
            made += names
            for number, name in enumerate(names):
                os.replace(_partial(folder, number), folder / name)
            if len(shards) > 1:
                weight_map = {tensor: name for name, held in zip(names, shards, strict=True) for tensor in held}
                _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
            _write_json(folder / "config.json", config_json)
    except BaseException:
        partials = [_partial(folder, number) for number in range(len(shards) + 1)]
        for path in (*partials, *(folder / name for name in made)):
            path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _reporting(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into a CheckpointError."""
    try:
        yield
    except OSError as err:
        raise CheckpointError(folder, [f"writing failed ({err}); free space or give another folder"]) from None


def _make_empty(folder: Path) -> None:
    """Make the folder; refuse one that holds a checkpoint, whole or in part. Leftovers of a broken write go."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in folder.iterdir())
    held = [name for name in names if name == "config.json" or (name.startswith("model") and "safetensors" in name)]
    held = [name for name in held if not name.endswith(_PARTIAL)]
    if held:
        raise CheckpointError(folder, [f"the folder already holds {', '.join(held)}; give a new folder or empty it"])
    leftovers = (folder / f"{name}{_PARTIAL}" for name in (INDEX_FILE, "config.json"))
    for path in (*folder.glob(f"model-*{_PARTIAL}"), *leftovers):
        path.unlink(missing_ok=True)


def _write_shards(
    folder: Path, stored: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int, shards: list[list[str]]
) -> int:
    """Fill and write one shard after another; their tensor names are appended to `shards`. Returns all bytes."""
    total_bytes = shard_bytes = 0
    pending: dict[str, np.ndarray] = {}
    seen: set[str] = set()

    def flush() -> None:
        with _reporting(folder):
            write_tensor_file(_partial(folder, len(shards)), pending)
        shards.append(list(pending))
        pending.clear()

    for name, array in stored:
        if name in seen:
            raise CheckpointError(folder, [f"{name} was given twice; give each tensor once"])
        if array.dtype not in NAMES:
            raise CheckpointError(folder, [f"{name} has dtype {array.dtype}, which no checkpoint can store"])
        seen.add(name)
        if pending and shard_bytes + array.nbytes > max_shard_bytes:
            flush()
            shard_bytes = 0
        pending[name] = np.ascontiguousarray(array).reshape(array.shape)
        shard_bytes += array.nbytes
        total_bytes += array.nbytes
    flush()
    return total_bytes


def _encoded(
    folder: Path, table: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, np.ndarray]], form: Form
) -> Iterator[tuple[str, np.ndarray]]:
    """Check each tensor against the table and encode it; name everything that is wrong at the end."""
    missing = dict.fromkeys(table)
    problems = []
    for name, values in tensors:
        spec = table.get(name)
        if spec is None:
            problems.append(f"{name} is no tensor of this model's backbone")
            continue
        missing.pop(name, None)
        if values.shape != spec.shape:
            problems.append(f"{name} has shape {list(values.shape)}; the configuration makes it {list(spec.shape)}")
        elif form == "quantized" and spec.kind == "fp4" and spec.shape[-1] % 2:
            problems.append(f"{name} has {spec.shape[-1]} columns, and FP4 packs two to a byte; write the plain form")
        elif not problems:
            yield from storage.encode(spec, values, form)
    if missing:
        problems.append(f"missing tensors ({len(missing)}): {', '.join(missing)}")
    if problems:
        raise CheckpointError(folder, problems)


def _partial(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05d}.safetensors{_PARTIAL}"


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    partial = path.with_name(path.name + _PARTIAL)
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
