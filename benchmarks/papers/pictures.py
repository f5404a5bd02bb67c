"""What the studies' figures have in common."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.palette import COLOURS, styles_of, write_png
from benchmarks.papers import front
from benchmarks.papers.front import Row
from benchmarks.papers.paired import Difference
from benchmarks.papers.study import Sample
from benchmarks.papers.tuned import Climb, Comparison, load, rate_of


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


_MARKERS = {"float32": "o", "bfloat16": "s", "int8": "^", "int4": "v", "sparse2": "D"}
_AT = "1 Gbit/s"


def accuracy_and_time(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw the difference in accuracy against the bytes per step, and against the time to the target.

    Args:
        rows: Results of a setting, float32 all-reduce first.
        path: Of the picture.
        title: Of the figure.
    """
    figure, (by_bytes, by_time) = panels(2, 5.2)
    for row in rows:
        apart, is_reached = row.apart or Difference(0.0, 0.0, 1), bool(row.times)
        drawn = {
            "fmt": _MARKERS[row.way.wire],
            "color": COLOURS[row.way.family],
            "markerfacecolor": COLOURS[row.way.family] if is_reached else "none",
            "markersize": 6,
            "elinewidth": 0.8,
            "capsize": 2,
        }
        number = re.search(r"\((\d+)", row.way.name)
        note = number[1] if number else ""
        half = apart.half if math.isfinite(apart.half) else 0.0
        places = [(by_bytes, row.share), *([(by_time, row.times[_AT])] if is_reached else [])]
        for axis, x in places:
            axis.errorbar([x], [apart.mean], yerr=[half], **drawn)
            axis.annotate(note, (x, apart.mean), textcoords="offset points", xytext=(5, 3), fontsize=9)
    for axis in (by_bytes, by_time):
        axis.axhline(0.0, color="black", linewidth=0.8, linestyle=":")
        axis.set(xscale="log")
        axis.set_yscale("symlog", linthresh=4)
        axis.set(ylim=(-60, 6))
        axis.set_yticks(ticks := (4, 2, 0, -2, -4, -10, -20, -50), [f"{tick:+d}" if tick else "0" for tick in ticks])
        axis.minorticks_off()
    by_bytes.set(xlabel="bytes per node and step, float32 all-reduce = 1", ylabel="points above float32 all-reduce")
    by_time.set(xlabel=f"predicted time to target at {_AT}, DDP = 1")
    times = [row.times[_AT] for row in rows if row.times]
    by_time.set_xlim(min(times) / 1.3, 1.3)
    by_time.set_xticks(
        marks := [x for x in (0.05, 0.1, 0.2, 0.5, 1) if x > min(times) / 1.3], [f"{x:g}" for x in marks]
    )
    families = dict.fromkeys(row.way.family for row in rows)
    wires = dict.fromkeys(row.way.wire for row in rows)
    shown = [by_bytes.plot([], [], "s", color=COLOURS[family], label=family)[0] for family in families]
    shown += [by_bytes.plot([], [], _MARKERS[wire], color="black", label=wire)[0] for wire in wires]
    shown += [by_bytes.plot([], [], "o", color="black", markerfacecolor="none", label="target never reached")[0]]
    figure.legend(handles=shown, loc="outside lower center", ncols=-(-len(shown) // 2), fontsize=11, frameon=False)
    save(figure, path, title)


def fronts(folder: Path) -> list[Path]:
    """Draw every stored setting of the front, and write the page; return the paths of what was written."""
    written = []
    for name, comparison in front.SETTINGS.items():
        if found := front.rows(comparison, load(comparison, folder)):
            written.append(folder / f"{name}.png")
            accuracy_and_time(found, written[-1], front.title(comparison))
    if written:
        written.append(folder / "README.md")
        written[-1].write_text(front.page(folder))
    return written


def legend(axis: Any) -> None:
    """Small; none if there is nothing yet."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7.5, frameon=False)


def save(figure: Any, path: Path, title: str) -> None:
    """Write it down."""
    figure.suptitle(title, fontsize=11)
    write_png(figure, path)
    plt.close(figure)
