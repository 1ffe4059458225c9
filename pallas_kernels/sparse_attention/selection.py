"""Which compressed entries each query row attends to, in the form its attention reads: indices or a mask."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectedIndices:
    """Entry indices per row, ascending, -1 = empty. For few rows over long contexts, and for the GPU kernels."""

    indices: Int32[Array, "B S k"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectedMask:
    """Entries per row as a mask. For many rows on a CPU, where one dense product beats many gathers."""

    mask: Bool[Array, "B S L"]


Selection = SelectedIndices | SelectedMask


def empty_selection(form: str, requests: int, rows: int) -> Selection:
    """Nothing selected: what a layer without compressed attention hands to its attention. `form` as in the program."""
    if form == "mask":
        return SelectedMask(jnp.zeros((requests, rows, 0), bool))
    return SelectedIndices(jnp.zeros((requests, rows, 0), jnp.int32))
