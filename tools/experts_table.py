"""The tables of `widemesh experts show`: what is going on, and each layer's load with a heat map of its ranks."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from rich.text import Text

from widemesh.eplb import balancedness, hash_text
from widemesh.serving.expert_control import ExpertStatus, model_flag
from widemesh.tools.experts_figures import LayerFigures, layer_figures, rank_shares

_OTHERS = 56  # columns that all but the heat map take
# Without colours: from no load to twice the mean, in quarters of it.
_LEVELS, _PLAIN_LEVELS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_COLD, _EVEN, _HOT = np.array([33, 102, 172]), np.array([247, 247, 247]), np.array([178, 24, 43])


def print_status(console: Console, status: ExpertStatus) -> None:
    """Both tables, and what a cell of the heat map means."""
    together = -(-status.layout.ranks // max(1, console.width - _OTHERS))  # ranks that share a cell
    levels = _LEVELS if console.encoding.lower().startswith("utf") else _PLAIN_LEVELS
    is_coloured = console.color_system is not None
    console.print(_summary(status))
    console.print(_layers(status, together, None if is_coloured else levels))
    one = "a rank" if together == 1 else f"the busiest of {together} ranks"
    scale = "blue: none, white: the mean, red: twice the mean" if is_coloured else (
        f"`{levels[1]}` idle, `{levels[4]}` the mean, `{levels[8]}` twice the mean")  # fmt: skip
    console.print(Text(f"a cell is the load of {one}, from rank 0 on; {scale}", style="dim"))


def _summary(status: ExpertStatus) -> Table:
    layout = status.layout
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    ends = ", ".join(f"{count:,} {how}" for how, count in sorted(status.rebalances.items())) or "none"
    steps = "1 step" if status.load_steps == 1 else f"{status.load_steps:,} steps"
    loaded = f"of {steps}" if status.load.any() else "none is known yet"
    for name, value in (
        (status.model, f"{layout.num_layers} layers, {layout.num_experts} experts and {layout.num_redundant_experts} "
                       f"redundant ones in {layout.num_slots} slots on {layout.ranks} ranks"),
        ("phase", _phase(status)),
        ("balancedness", _balancedness(status)),
        ("load", loaded),
        ("rebalances", ends),
        ("last failure", status.last_failure or "-"),
        ("moved", f"{status.moved_rows:,} expert rows of at least {status.least_rows:,}, "
                  f"{status.moved_bytes / 2**20:,.1f} MiB"),
        ("placement", hash_text(status.placement_hash)),
    ):  # fmt: skip
        table.add_row(name, Text(value))
    return table


def _phase(status: ExpertStatus) -> str:
    words = [status.phase]
    if status.imported_hash:
        words.append(f"placement {hash_text(status.imported_hash)} is not in every process of the engine yet")
    if status.layers_total:
        words.append(f"{status.layers_done} of {status.layers_total} layers")
    if status.is_paused:
        words.append("paused")
    elif status.is_disabled:
        resume = f"widemesh experts resume{model_flag(status.model)}"
        words.append(f"given up after too many failures; `{resume}` tries again")
    elif status.steps_to_trigger:
        words.append(f"next plan in {status.steps_to_trigger:,} steps")
    return ", ".join(words)


def _balancedness(status: ExpertStatus) -> str:
    if status.balancedness == 0:
        return "-"
    bound = f", at most {status.feasible:.3f} under the load of the last plan" if status.feasible > 0 else ""
    return f"{status.balancedness:.3f}{bound}"


def _layers(status: ExpertStatus, together: int, levels: str | None) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("layer", "balanced", "hottest rank", "hottest expert", "copies", "empty"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ranks", no_wrap=True)
    shares = rank_shares(status.load, status.layout.ranks)
    for figures, row in zip(layer_figures(status), shares, strict=True):
        table.add_row(*_cells(figures), _heat(row, together, levels))
    # Ranks of all layers together; no expert, since experts of different layers have nothing to do with each other.
    summed = rank_shares(status.load.sum(0, keepdims=True), status.layout.ranks)[0]
    hottest, is_known = int(summed.argmax()), bool(summed.any())
    table.add_row(
        "all", f"{balancedness(status.load, status.layout.ranks):.3f}" if is_known else "-",
        f"{hottest} {summed[hottest]:.2f}x" if is_known else "-", "-", "-", str(int((status.slot_owner < 0).sum())),
        _heat(summed, together, levels), style="bold",
    )  # fmt: skip
    return table


def _cells(one: LayerFigures) -> list[str]:
    if one.hottest_rank is None:
        return [str(one.layer), "-", "-", "-", "-", str(one.empty_slots)]
    return [
        str(one.layer), f"{one.balancedness:.3f}", f"{one.hottest_rank} {one.hottest_rank_share:.2f}x",
        f"{one.hottest_expert} {one.hottest_expert_share:.1%}", str(one.hottest_expert_copies), str(one.empty_slots),
    ]  # fmt: skip


def _heat(shares: Float[np.ndarray, "R"], together: int, levels: str | None) -> Text:
    """A cell for each group of ranks: coloured, or a character of `levels`."""
    text = Text()
    for start in range(0, len(shares), together):
        share = min(float(shares[start : start + together].max()), 2.0)
        if levels is not None:
            text.append(levels[round(share * 4)])
        else:
            end = _COLD if share < 1 else _HOT
            red, green, blue = np.round(_EVEN + (end - _EVEN) * abs(share - 1)).astype(int)
            text.append(" ", style=f"on rgb({red},{green},{blue})")
    return text
