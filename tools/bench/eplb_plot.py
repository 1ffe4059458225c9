"""The picture of `widemesh bench eplb`: rank loads per layer, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from widemesh.tools.bench.eplb_loads import Measured

_MOST = 2.0  # times the mean load, from where on the colour stays the same


def plot_rank_loads(path: Path, pairs: Sequence[tuple[str, Measured, Measured]]) -> None:
    """A row of two heat maps, layers by ranks, for each (title, before, after)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4 * len(pairs)), layout="constrained")
    axes = figure.subplots(len(pairs), 2, squeeze=False, sharey="row")
    for row, (title, *both) in zip(axes, pairs, strict=True):
        for ax, when, one in zip(row, ("before", "after"), both, strict=True):
            image = ax.imshow(np.asarray(one.rank_share), vmin=0, vmax=_MOST, cmap="RdBu_r", aspect="auto",
                              interpolation="nearest")  # fmt: skip
            ax.set_title(f"{title}\n{when}: balancedness {one.balancedness:.3f}")
            ax.set_xlabel("rank")
        row[0].set_ylabel("layer")
        figure.colorbar(image, ax=row, label="load / mean load of the layer", extend="max")
    figure.savefig(path, dpi=120)
