"""The engine's weights by released tensor name: those of the checkpoint, and what callers have put in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from widemesh.model.checkpoint import Checkpoint
from widemesh.model.checkpoint.table import is_recognised_extra, tensor_table

_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))


class Weights:
    """Reads tensors as float32. An update is a new object; what it does not name is read as before."""

    def __init__(self, checkpoint: Checkpoint, replaced: Mapping[str, np.ndarray] | None = None):
        self._checkpoint, self._replaced = checkpoint, dict(replaced or {})

    def read(self, name: str) -> np.ndarray:
        """One tensor, float32, in its logical shape."""
        found = self._replaced.get(name)
        return self._checkpoint.read(name) if found is None else found.astype(np.float32)

    def updated(self, tensors: Mapping[str, Any]) -> Weights:
        """With these tensors in place of the ones of their names; they are copied.

        Raises ValueError that names the first tensor that the model has not, or has in another shape, or that is
        neither float32 nor bfloat16. Tensors of a released checkpoint that the model does not use are ignored.
        """
        table, taken = tensor_table(self._checkpoint.config), {}
        for name, value in tensors.items():
            if name not in table:
                if is_recognised_extra(name):
                    continue
                raise ValueError(f"tensor {name!r} is not one of the model's; leave it out")
            array = np.asarray(value)
            if array.shape != table[name].shape:
                raise ValueError(f"tensor {name!r} has shape {array.shape}; give {table[name].shape}")
            if array.dtype not in _DTYPES:
                raise ValueError(f"tensor {name!r} has dtype {array.dtype}; give float32 or bfloat16")
            taken[name] = array.copy()
        return Weights(self._checkpoint, self._replaced | taken)
