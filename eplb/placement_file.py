"""A placement as a JSON file: to look at, to keep, and to start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from widemesh.eplb.layout import ExpertLayout
from widemesh.eplb.placement import as_placement, hash_text, placement_hash
from widemesh.model.config import ConfigError

_SIZES = ("num_layers", "num_experts", "ranks", "num_redundant_experts")


def dump_placement(slot_owner: Int32[np.ndarray, "L X"], layout: ExpertLayout) -> str:
    """JSON with the sizes of the layout, one list of owners per layer, and the placement's hash."""
    content: dict[str, Any] = {name: getattr(layout, name) for name in _SIZES}
    content["hash"] = hash_text(placement_hash(slot_owner))
    head = json.dumps(content)[:-1]
    layers = ",\n".join(json.dumps(owners) for owners in slot_owner.tolist())
    return f'{head}, "slot_owner": [\n{layers}\n]}}\n'


def parse_placement(text: str, layout: ExpertLayout, source: str = "placement") -> Int32[np.ndarray, "L X"]:
    """The placement in `text`, checked for this layout. Sizes and hash may be left out of a file written by hand.

    Raises ConfigError, which begins with `source`.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{source} is not JSON ({err}); use a file that was exported from a placement") from None
    if not isinstance(content, dict) or not isinstance(content.get("slot_owner"), list):
        raise ConfigError(f"{source} has no list slot_owner; write one list of slot owners per layer under that name")
    for name in _SIZES:
        if content.get(name, getattr(layout, name)) != getattr(layout, name):
            wanted = getattr(layout, name)
            raise ConfigError(f"{source} was made for {name}={content[name]!r}; it must be {wanted}: use a placement "
                              f"of a model with {name}={wanted}")  # fmt: skip
    owner = as_placement(content["slot_owner"], layout, source)
    found = hash_text(placement_hash(owner))
    if content.get("hash", found) != found:
        raise ConfigError(f"{source} does not have the hash that stands in it ({content['hash']!r}); it was changed or "
                          "damaged: export it again, or leave the hash out")  # fmt: skip
    return owner


def read_placement(path: Path, layout: ExpertLayout) -> Int32[np.ndarray, "L X"]:
    """The placement in a file. Raises ConfigError, which names the file, and OSError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text; use a file that was exported from a placement") from None
    return parse_placement(text, layout, str(path))
