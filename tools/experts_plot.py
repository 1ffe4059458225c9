"""The picture of `widemesh experts show --out`: load by layer and rank, and the copies of every expert."""

from __future__ import annotations

from pathlib import Path

from widemesh.eplb.balance import count_copies
from widemesh.serving.expert_control import ExpertStatus
from widemesh.tools.experts_figures import rank_shares

_MOST = 2.0  # times the mean load, from where on the colour stays the same


def plot_status(path: Path, status: ExpertStatus) -> None:
    """Two maps side by side, a row for each layer. Raises OSError."""
    import matplotlib as mpl
    from matplotlib.colors import BoundaryNorm
    from matplotlib.figure import Figure

    layout = status.layout
    copies = count_copies(status.slot_owner, layout.num_experts)
    figure = Figure(figsize=(13, max(3.0, 1.5 + 0.12 * layout.num_layers)), layout="constrained")
    loads, counts = figure.subplots(1, 2, width_ratios=(2, 3), sharey=True)
    image = loads.imshow(rank_shares(status.load, layout.ranks), vmin=0, vmax=_MOST, cmap="RdBu_r", aspect="auto",
                         interpolation="nearest")  # fmt: skip
    loads.set_title(f"{status.model}: load of {status.load_steps:,} steps, balancedness {status.balancedness:.3f}")
    loads.set_xlabel("rank")
    loads.set_ylabel("layer")
    figure.colorbar(image, ax=loads, label="load / mean load of the layer", extend="max")
    edges = [count + 0.5 for count in range(layout.max_copies + 1)]  # 0.5, 1.5, ...: a colour for each number
    image = counts.imshow(copies, cmap="viridis", norm=BoundaryNorm(edges, mpl.colormaps["viridis"].N), aspect="auto",
                          interpolation="nearest")  # fmt: skip
    counts.set_title(f"copies: {layout.num_experts} experts, {layout.num_redundant_experts} redundant ones")
    counts.set_xlabel("expert")
    figure.colorbar(image, ax=counts, label="slots of the expert", ticks=range(1, layout.max_copies + 1))
    figure.savefig(path, dpi=120)
