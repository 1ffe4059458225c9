"""Another planner, from a Python file, for `widemesh bench eplb`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from widemesh.eplb import ExpertLayout
from widemesh.model.config import ConfigError

_FUNCTION = "rebalance_experts"


def load_peer(path: Path) -> Callable[[np.ndarray, ExpertLayout], np.ndarray]:
    """`rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus)` of that file: load to slot owners.

    It returns a sequence whose first item is [layers, slots]. A file that imports torch gets a tensor, others an array.
    Raises ConfigError if the file cannot be used.
    """
    spec = importlib.util.spec_from_file_location("eplb_peer_file", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"peer={str(path)!r} is not a Python file; name one that defines {_FUNCTION}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as err:
        raise ConfigError(f"peer={str(path)!r} cannot be imported ({err}); install what it needs") from None
    except Exception as err:
        raise ConfigError(f"peer={str(path)!r} cannot be run ({type(err).__name__}: {err}); correct it") from None
    function = getattr(module, _FUNCTION, None)
    if function is None:
        raise ConfigError(f"peer={str(path)!r} has no {_FUNCTION}(weight, num_replicas, num_groups, num_nodes, "
                          "num_gpus); name a file that has")  # fmt: skip
    torch: Any = getattr(module, "torch", None)

    def plan(load: np.ndarray, layout: ExpertLayout) -> np.ndarray:
        weight = load if torch is None else torch.from_numpy(np.ascontiguousarray(load))
        found = np.asarray(function(weight, layout.num_slots, layout.num_groups, layout.num_nodes, layout.ranks)[0])
        if found.shape != (layout.num_layers, layout.num_slots):
            raise ConfigError(f"peer={str(path)!r} gives a placement of shape {found.shape}; the first of what it "
                              f"returns must be {(layout.num_layers, layout.num_slots)}, layers by slots")  # fmt: skip
        return found.astype(np.int32)

    return plan
