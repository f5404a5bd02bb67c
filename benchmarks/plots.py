"""Plots from stored results: they measure nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.contenders import BOUNDS, ROWS
from benchmarks.measure import Cell

_COLOURS = plt.get_cmap("tab20")


def step_time_against_bandwidth(settings: Sequence[Sequence[Cell]], path: Path) -> None:
    """One line per row measured at several rates; the settings are one workload on one layout."""
    by_row: dict[str, list[tuple[float, float]]] = {}
    for cells in settings:
        for cell in cells:
            if cell.mbit is not None and cell.step_ms is not None and cell.row not in ("loop", "link"):
                by_row.setdefault(cell.row, []).append((cell.mbit, cell.step_ms))
    figure, axes = plt.subplots(figsize=(8, 5.5))
    lines = {row: points for row, points in by_row.items() if len(points) > 1}
    for index, (row, points) in enumerate(lines.items()):
        rates, times = zip(*sorted(points), strict=True)
        dashed = {"linestyle": "--", "color": "black", "alpha": 0.4 + 0.3 * (row == "node")} if row in BOUNDS else {}
        style: dict[str, Any] = {"color": _COLOURS(index % 20), **dashed}
        axes.plot(rates, times, marker=None if row in BOUNDS else "o", markersize=4, label=ROWS[row].title, **style)
    first = settings[0][0]
    axes.set(xscale="log", yscale="log", xlabel="link rate, Mbit/s", ylabel="milliseconds per step")
    axes.set_title(f"{first.workload}, {first.nodes} nodes x {first.ranks_per_node} ranks")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=6, ncols=2)
    _save(figure, path)


def accuracy(curves: dict[str, list[dict[str, float]]], title: str, path: Path) -> None:
    """Held-out loss against time, and against bytes sent per node."""
    figure, (by_time, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for index, (row, points) in enumerate(curves.items()):
        values = [point["loss"] for point in points]
        style = {"color": _COLOURS(index % 20), "label": ROWS[row].title}
        by_time.plot([point["seconds"] for point in points], values, **style)
        by_bytes.plot([max(point["bytes"], 1) / 1e6 for point in points], values, **style)
    by_time.set(xlabel="seconds of training", ylabel="held-out loss", title=title)
    by_bytes.set(xlabel="MB sent per node", xscale="log")
    by_bytes.legend(fontsize=6)
    for axes in (by_time, by_bytes):
        axes.grid(True, alpha=0.2)
    _save(figure, path)


def timeline(records: dict[str, list[dict[str, Any]]], steps: int, mbit: float | None, path: Path) -> None:
    """For each row, the last ``steps`` steps: what each rank computes, and how full each node's link is."""
    figure, all_axes = plt.subplots(len(records), 1, figsize=(10, 1.9 * len(records)), squeeze=False)
    for axes, (row, ranks) in zip(all_axes[:, 0], records.items(), strict=True):
        ends = ranks[0]["step_ends"]
        start, stop = ends[-steps - 1], ends[-1]
        nodes = 1 + max(rank["node"] for rank in ranks)
        labels = [f"rank {rank['rank']}" for rank in ranks] + [f"node {node} sends" for node in range(nodes)]
        for line, rank in enumerate(ranks):
            compute = [(began - start, ended - began) for began, ended in rank["compute"] if start <= began < stop]
            axes.broken_barh(compute, (line + 0.15, 0.7), color="tab:blue")
        for node in range(nodes):
            samples: list[list[float]] = next(
                (rank["traffic"] for rank in ranks if rank["node"] == node and rank["traffic"]), []
            )
            line = len(ranks) + node
            times, rates = _rates([sample for sample in samples if start <= sample[0] <= stop])
            most = mbit or max(rates, default=1.0) or 1.0
            heights = [line + 1 - min(rate / most, 1.0) for rate in rates]
            axes.fill_between([time - start for time in times], line + 1, heights, color="tab:orange")
        for end in ends[-steps:]:
            axes.axvline(end - start, color="black", linewidth=0.4)
        axes.set_yticks([line + 0.5 for line in range(len(labels))], labels, fontsize=6)
        axes.set_ylim(len(labels), 0)
        axes.set_xlim(0, stop - start)
        axes.set_title(ROWS[row].title, fontsize=8, loc="left", pad=2)
        axes.tick_params(axis="x", labelsize=6)
    all_axes[-1, 0].set_xlabel(
        "seconds; blue: forward and backward; orange: share of the link's rate; lines: steps end"
    )
    _save(figure, path)


def _rates(samples: Sequence[Sequence[float]], window: int = 4) -> tuple[list[float], list[float]]:
    """Mbit/s between every ``window``-th sample of (time, bytes)."""
    chosen = list(samples[::window])
    pairs = [(before, after) for before, after in pairwise(chosen) if after[0] > before[0]]
    return (
        [after[0] for _, after in pairs],
        [(after[1] - before[1]) * 8e-6 / (after[0] - before[0]) for before, after in pairs],
    )


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)
