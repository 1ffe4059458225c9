"""One safetensors file: the header checked by the safetensors library, the tensors mapped into memory.

The library's NumPy front end has no bfloat16 and no 8-bit floats to read into, so tensors are views of the mapped file
with the dtypes of `ml_dtypes`. Nothing is read until a view is touched.
"""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Shaped

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
        "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64,
        "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}  # fmt: skip
NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class TensorFileError(ValueError):
    """A file that is not whole or not of this format. The message starts with its name and gives the reason."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor lies: the dtype by the format's name, and the bytes' offset from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFile:
    """An open file. The mapping lives as long as this object or any array that it gave out."""

    path: Path
    entries: Mapping[str, Entry]
    data: np.ndarray  # uint8, the whole file

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        """Read the header. Raises TensorFileError when the file is missing, truncated or not in this format."""
        if not path.is_file():
            raise TensorFileError(f"{path.name} does not exist; copy the whole checkpoint")
        try:
            # The library checks the header, and that the tensors fill the rest of the file exactly.
            with safetensors.safe_open(path, framework="np"):
                pass
            data = np.memmap(path, np.uint8, mode="r")
        except (OSError, ValueError, safetensors.SafetensorError) as err:
            raise TensorFileError(
                f"{path.name} is truncated, damaged or no safetensors file ({err}); copy it again"
            ) from None
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:start].tobytes())
        header.pop("__metadata__", None)
        entries = {}
        for name, item in header.items():
            begin, end = item["data_offsets"]
            entries[name] = Entry(item["dtype"], tuple(item["shape"]), start + begin, end - begin)
        return cls(path=path, entries=entries, data=data)

    def tensor(self, name: str) -> Shaped[np.ndarray, "*S"]:
        """The stored tensor, a read-only view of the file. Raises KeyError for names or dtypes that are not known."""
        entry = self.entries[name]
        stored = self.data[entry.offset : entry.offset + entry.num_bytes]
        return stored.view(np.ndarray).view(DTYPES[entry.dtype]).reshape(entry.shape)


def write_tensor_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write contiguous arrays of the dtypes in `DTYPES`. The same tensors always give the same bytes.

    Raises OSError when the file cannot be written.
    """
    path.touch()
    mode = path.stat().st_mode  # what the user's mask gives a new file; the library leaves it to the owner alone
    try:
        safetensors.numpy.save_file(dict(tensors), path, metadata={"format": "pt"})
        path.chmod(mode)
    except safetensors.SafetensorError as err:
        raise OSError(errno.EIO, str(err), str(path)) from None
