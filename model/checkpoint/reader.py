"""Opening a checkpoint folder: every check on the headers, then tensors one at a time, mapped from disk.

Whether a tensor is plain or quantised is told by its stored dtype, so folders that mix both are fine.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float32, Shaped

from widemesh.model.checkpoint import storage
from widemesh.model.checkpoint.errors import CheckpointError
from widemesh.model.checkpoint.table import TensorSpec, is_recognised_extra, tensor_table
from widemesh.model.checkpoint.tensor_file import DTYPES, NAMES, Entry, TensorFile, TensorFileError
from widemesh.model.config import ConfigError, ModelConfig

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An open, checked checkpoint. Holds file mappings, no tensor values."""

    folder: Path
    config: ModelConfig
    table: Mapping[str, TensorSpec]  # the backbone, and the draft if it is in use, by released name
    form: Literal["plain", "quantized", "mixed"]
    extras: tuple[str, ...]  # stored tensors that are recognised but not in the table, sorted
    files: Mapping[str, TensorFile]  # the file of every stored tensor

    @classmethod
    def open(cls, folder: str | Path, num_speculative_tokens: int = 0) -> Checkpoint:
        """Check a folder from its headers alone. Raises one CheckpointError that names everything wrong with it.

        `num_speculative_tokens` as in `ModelConfig`: with 0 the draft's tensors are extras, and may be missing. The
        files are those of model.safetensors.index.json if there is one, else model.safetensors.
        """
        folder = Path(folder)
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise CheckpointError(folder, [f"the folder {what}; give a folder that holds config.json and weights"])
        problems: list[str] = []
        config = None
        try:
            config = ModelConfig.from_dir(folder).with_draft(num_speculative_tokens)
        except ConfigError as err:
            problems.append(str(err))
        found = _find_tensors(folder)
        problems.extend(found.problems)
        table = tensor_table(config) if config is not None else {}
        if config is not None:
            problems.extend(_check_tensors(table, found))
        if problems or config is None:
            raise CheckpointError(folder, problems)

        known = {name for one in table for name in (one, storage.scale_name(one))}
        extras = tuple(sorted(name for name in found.files if is_recognised_extra(name) and name not in known))
        if extras:
            parts = Counter(name.split(".")[0] for name in extras)
            listing = ", ".join(f"{part}: {count}" for part, count in parts.items())
            _log.info("%s: %d tensors are not used yet and skipped (%s)", folder, len(extras), listing)
        return cls(
            folder=folder, config=config, table=table, form=_form(table, found), extras=extras, files=found.files
        )

    def raw(self, name: str) -> Shaped[np.ndarray, "*S"]:
        """A stored tensor, scales and extras included, as a read-only view of the file.

        The dtype is the stored one by `ml_dtypes`; E8M0 scales and FP4 codes are bytes (`.view(np.uint8)`), no numbers.
        """
        if name not in self.files:
            raise KeyError(f"{self.folder} stores no tensor {name!r}")
        return self.files[name].tensor(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Float32[np.ndarray, "*S"]:
        """Logical float32 values of a tensor of the table, dequantised if need be: all of it or rows start..stop-1.

        `start` must be a multiple of 32 for tensors that are stored in 32 x 32 blocks. Only those rows are read.
        """
        spec = self.table.get(name)
        if spec is None:
            raise KeyError(f"{name!r} is no tensor of this model")
        weight = self.raw(name)[start:stop]
        if not storage.has_scale(weight.dtype):
            return storage.decode(spec.kind, weight, None)
        scale = self.raw(storage.scale_name(name))
        if spec.kind == "fp8":
            if start % storage.FP8_GROUP:
                raise ValueError(f"start={start} must be a multiple of {storage.FP8_GROUP} for {name}")
            first = start // storage.FP8_GROUP
            scale = scale[first : first - (-len(weight) // storage.FP8_GROUP)]
        else:
            scale = scale[start:stop]
        return storage.decode(spec.kind, weight, scale)

    def stored(self, name: str) -> tuple[Shaped[np.ndarray, "*S"], Shaped[np.ndarray, "a b"] | None]:
        """A tensor of the table in the quantised form: weight, and scales if it has some, of the stored dtypes.

        What is quantised on disk comes as a read-only view of its bytes; what is plain there is quantised now.
        """
        spec = self.table.get(name)
        if spec is None:
            raise KeyError(f"{name!r} is no tensor of this model")
        weight = self.raw(name)
        if weight.dtype != storage.stored_dtype(spec.kind, "quantized"):
            return storage.quantise(spec, self.read(name))
        return weight, self.raw(storage.scale_name(name)) if storage.has_scale(weight.dtype) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """What the files of a folder hold: the file of each tensor that could be located, and what went wrong."""

    files: dict[str, TensorFile]
    unreadable: set[str]  # tensors of an index whose file could not be read; their absence is reported already
    is_listed: bool  # False: no file could be read, so that nothing is known about any tensor
    problems: list[str]


def _find_tensors(folder: Path) -> _Found:
    index_path = folder / INDEX_FILE
    if index_path.exists():
        return _find_by_index(folder, index_path)
    problem = None
    if not (folder / SINGLE_FILE).exists():
        problem = f"neither {INDEX_FILE} nor {SINGLE_FILE} exists; give a folder that holds the weights"
    else:
        try:
            file = TensorFile.open(folder / SINGLE_FILE)
            return _Found(files=dict.fromkeys(file.entries, file), unreadable=set(), is_listed=True, problems=[])
        except TensorFileError as err:
            problem = str(err)
    return _Found(files={}, unreadable=set(), is_listed=False, problems=[problem])


def _find_by_index(folder: Path, index_path: Path) -> _Found:
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise TypeError("weight_map is no object of names to file names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as err:  # the last: nested too deeply
        reason = "weight_map is missing" if isinstance(err, KeyError) else str(err)
        problem = f"{INDEX_FILE} cannot be used ({reason}); copy it again"
        return _Found(files={}, unreadable=set(), is_listed=False, problems=[problem])
    files: dict[str, TensorFile] = {}
    unreadable: set[str] = set()
    problems: list[str] = []
    for shard in sorted(set(weight_map.values())):
        names = sorted(name for name, where in weight_map.items() if where == shard)
        try:
            if Path(shard).name != shard:
                raise TensorFileError(f"{INDEX_FILE} names {shard!r}; only files of the folder itself are read")
            file = TensorFile.open(folder / shard)
        except TensorFileError as err:
            problems.append(f"{err} ({len(names)} tensors are in it)")
            unreadable.update(names)
            continue
        absent = [name for name in names if name not in file.entries]
        if absent:
            problems.append(f"{INDEX_FILE} places tensors in {shard} that it does not hold: {', '.join(absent)}")
            unreadable.update(absent)
        files.update({name: file for name in names if name in file.entries})
    return _Found(files=files, unreadable=unreadable, is_listed=True, problems=problems)


def _check_tensors(table: Mapping[str, TensorSpec], found: _Found) -> list[str]:
    """Hold what was found against the table. A scale is expected where its weight is stored quantised."""
    if not found.is_listed:
        return []
    missing: list[str] = []
    wrong: list[str] = []
    known = set(table)
    for spec in table.values():
        partner = storage.scale_name(spec.name)
        if spec.name not in found.files:
            # Without the weight it is unknown whether scales belong to it.
            known.add(partner)
            if spec.name not in found.unreadable:
                missing.append(spec.name)
            continue
        entry = _entry(found, spec.name)
        dtype = DTYPES.get(entry.dtype)
        allowed = {storage.stored_dtype(spec.kind, "plain"), storage.stored_dtype(spec.kind, "quantized")}
        if dtype not in allowed:
            wanted = " or ".join(sorted(NAMES[d] for d in allowed))
            wrong.append(f"{spec.name} has dtype {entry.dtype}; it must be {wanted}")
            known.add(partner)
            continue
        shape = storage.stored_shape(spec, dtype)
        if entry.shape != shape:
            wrong.append(f"{spec.name} has shape {list(entry.shape)}; config.json makes it {list(shape)}")
        if storage.has_scale(dtype):
            known.add(partner)
            if partner in found.files:
                wrong.extend(_check_scale(spec, partner, _entry(found, partner)))
            elif partner not in found.unreadable:
                missing.append(partner)
    unexpected = sorted(name for name in found.files if name not in known and not is_recognised_extra(name))
    foreign = [name for name in found.files if is_recognised_extra(name) and _entry(found, name).dtype not in DTYPES]
    problems = []
    if missing:
        problems.append(f"missing tensors ({len(missing)}): {', '.join(missing)}")
    if unexpected:
        problems.append(f"unexpected tensors ({len(unexpected)}): {', '.join(unexpected)}")
    wrong.extend(f"{name} has dtype {_entry(found, name).dtype}, which cannot be read" for name in foreign)
    return problems + wrong


def _check_scale(spec: TensorSpec, name: str, entry: Entry) -> list[str]:
    problems = []
    if entry.dtype != NAMES[storage.E8M0]:
        problems.append(f"{name} has dtype {entry.dtype}; it must be {NAMES[storage.E8M0]}")
    if entry.shape != storage.scale_shape(spec):
        expected = list(storage.scale_shape(spec))
        problems.append(f"{name} has shape {list(entry.shape)}; config.json makes it {expected}")
    return problems


def _entry(found: _Found, name: str) -> Entry:
    return found.files[name].entries[name]


def _form(table: Mapping[str, TensorSpec], found: _Found) -> Literal["plain", "quantized", "mixed"]:
    quantizable = [spec for spec in table.values() if spec.kind in ("fp8", "fp4", "engram")]
    quantized = sum(storage.has_scale(DTYPES[_entry(found, spec.name).dtype]) for spec in quantizable)
    if quantized == 0:
        return "plain"
    return "quantized" if quantized == len(quantizable) else "mixed"
