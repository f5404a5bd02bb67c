"""What the studies' figures have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.palette import styles_of
from benchmarks.papers.study import Sample
from benchmarks.papers.tuned import Climb, Comparison, rate_of


def panels(count: int, height: float = 4.2) -> tuple[Any, list[Any]]:
    """A figure of panels side by side."""
    figure, axes = plt.subplots(1, count, figsize=(5.2 * count, height), squeeze=False, layout="constrained")
    for axis in axes[0]:
        axis.grid(True, alpha=0.25)
    return figure, list(axes[0])


def lines(axis: Any, where: Sequence[float], samples: dict[str, Sequence[Sample]], rows: Sequence[str]) -> None:
    """A line per method with a bar per seed spread.

    Args:
        axis: Where to.
        where: Along the horizontal axis.
        samples: By label.
        rows: What each of them is called in :mod:`benchmarks.palette`.
    """
    unique = [f"{row}@{index}" for index, row in enumerate(rows)]
    styles = styles_of(unique)
    for name, (label, values) in zip(unique, samples.items(), strict=True):
        kept = [(x, sample) for x, sample in zip(where, values, strict=True) if sample.values]
        axis.errorbar(
            [x for x, _ in kept],
            [sample.mean for _, sample in kept],
            yerr=[sample.spread for _, sample in kept],
            label=label,
            capsize=2,
            markersize=4.5,
            elinewidth=0.8,
            **styles[name],
        )


def ladders(comparison: Comparison, known: Mapping[str, Climb], path: Path) -> None:
    """Accuracy over learning rates: how much of it each contender stands."""
    figure, (axis,) = panels(1, 5.0)
    for index, contender in enumerate(comparison.contenders):
        climb = known.get(contender.name)
        if climb is None or not climb.tuning:
            continue
        rungs = sorted(climb.tuning)
        style = ("-", "--", ":")[index // 8]
        shown = {"color": "black" if index == 0 else f"C{(index - 1) % 7}", "linestyle": style, "marker": "o"}
        axis.plot(
            [rate_of(rung) for rung in rungs],
            [climb.mean(rung) for rung in rungs],
            label=contender.name,
            markersize=4,
            **shown,
        )
    axis.set(xscale="log", xlabel="highest learning rate", ylabel="accuracy on tuning data, %")
    legend(axis)
    arena = comparison.arena
    title = f"{comparison.name}: {arena.nodes} nodes, batches of {arena.batch} each, {arena.epochs} epochs"
    save(figure, path, f"{title}, {arena.model}, {arena.optimizer}")


def legend(axis: Any) -> None:
    """Small; none if there is nothing yet."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7.5, frameon=False)


def save(figure: Any, path: Path, title: str) -> None:
    """Write it down."""
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, bbox_inches="tight", pil_kwargs={"optimize": True})
    plt.close(figure)
