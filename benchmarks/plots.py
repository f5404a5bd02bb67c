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
from benchmarks.palette import colour_of, styles_of

WORDS = {
    "mlp11m": "a perceptron of 11 M parameters",
    "mlp1m": "a perceptron of 1 M parameters",
    "mlp85k": "a perceptron of 85 k parameters",
    "linear16m": "a perceptron of 16 M parameters",
    "digits": "handwritten digits",
    "characters": "a character model",
    "characters_adamw": "a character model with AdamW",
}
"""Workloads, for titles."""


def step_time_against_bandwidth(settings: Sequence[Sequence[Cell]], path: Path) -> None:
    """One line per row measured at several rates; the settings are one workload on one layout."""
    by_row: dict[str, list[tuple[float, float, float]]] = {}
    for cells in settings:
        for cell in cells:
            if cell.mbit is not None and cell.step_ms is not None and cell.row not in ("loop", "link", "probe"):
                by_row.setdefault(cell.row, []).append((cell.mbit, cell.step_ms, cell.spread_ms or 0.0))
    lines = {row: sorted(points) for row, points in by_row.items() if len(points) > 1}
    lines = dict(sorted(lines.items(), key=lambda line: -line[1][0][1]))  # the legend in the order of the left edge
    styles = styles_of(list(lines))
    figure, axes = plt.subplots(figsize=(9.5, 5))
    for row, points in lines.items():
        rates, times, spreads = zip(*points, strict=True)
        half = [spread / 2 for spread in spreads]
        style = {"markersize": 4.5, "capsize": 2, "elinewidth": 0.8, "label": ROWS[row].title, **styles[row]}
        axes.errorbar(rates, times, yerr=None if row in BOUNDS else half, **style)
    first = settings[0][0]
    ticks = sorted({rate for points in lines.values() for rate, _, _ in points})
    axes.set(xscale="log", yscale="log")
    axes.set(xlabel="rate of the link between nodes, Mbit/s", ylabel="milliseconds per step")
    axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks], minor=False)
    axes.minorticks_off()
    low, high = axes.get_ylim()
    marks = [mark * 10**power for power in range(-2, 7) for mark in (1, 2, 5) if low <= mark * 10**power <= high]
    axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
    axes.set_title(f"Time of a training step: {_words(first.workload)}, {_layout(first.nodes, first.ranks_per_node)}")
    axes.grid(True, alpha=0.25)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, title=_spread(settings))
    axes.get_legend().get_title().set_fontsize(8)
    _save(figure, path)


def accuracy(curves: dict[str, list[dict[str, float]]], title: str, path: Path) -> None:
    """Held-out loss against time, and against bytes sent per node; the bands are as wide as the seeds are apart.

    Results of earlier versions hold no loss: then it is the accuracy.
    """
    has_loss = all("loss" in point for points in curves.values() for point in points)
    value, label = ("loss", "loss on held-out data") if has_loss else ("accuracy", "accuracy on held-out data")
    figure, (by_time, by_bytes) = plt.subplots(1, 2, figsize=(12, 4.6), sharey=True)
    styles, has_bands = styles_of(list(curves)), False
    for row, points in curves.items():
        values = [point[value] for point in points]
        half = [point.get(f"{value}_spread", 0.0) / 2 for point in points]
        has_bands = has_bands or any(half)
        every = max(1, len(points) // 5)  # wires differ in their markers
        style = {"label": ROWS[row].title, "markersize": 4.5, "markevery": every, **styles[row]}
        seconds = [point["seconds"] for point in points]
        megabytes = [max(point["bytes"], 1) / 1e6 for point in points]
        for axes, where in ((by_time, seconds), (by_bytes, megabytes)):
            axes.plot(where, values, **style)
            if any(half):
                lower, upper = ([v + sign * h for v, h in zip(values, half, strict=True)] for sign in (-1, 1))
                axes.fill_between(where, lower, upper, color=style["color"], alpha=0.12, linewidth=0)
    by_time.set(xlabel="seconds of training", ylabel=label, xlim=(0, None))
    by_bytes.set(xlabel="MB that a node sent to others", xscale="log")
    workload, _, setting = title.partition("-")
    layout, _, rate = setting.partition("-")
    words = [f"Learning {_words(workload)}"]
    if "x" in layout:
        words.append(_layout(*map(int, layout.split("x"))))
    if rate.endswith("mbit"):
        words.append("no limit of rate" if rate == "0mbit" else f"a link of {rate.removesuffix('mbit')} Mbit/s")
    figure.suptitle(", ".join(words) + "; bands: between seeds" * has_bands, fontsize=11)
    by_bytes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    for axes in (by_time, by_bytes):
        axes.grid(True, alpha=0.25)
    _save(figure, path)


def timeline(records: dict[str, list[dict[str, Any]]], steps: int, mbit: float | None, path: Path) -> None:
    """For each row, the last ``steps`` steps: what each rank computes, and how full each node's link is.

    All rows have one scale of time, so the length of a row is how long it took.
    """
    figure, all_axes = plt.subplots(len(records), 1, figsize=(10, 1.9 * len(records)), squeeze=False, sharex=True)
    longest = 0.0
    for axes, (row, ranks) in zip(all_axes[:, 0], records.items(), strict=True):
        ends = ranks[0]["step_ends"]
        start, stop = ends[-steps - 1], ends[-1]
        longest = max(longest, stop - start)
        nodes = 1 + max(rank["node"] for rank in ranks)
        labels = [f"rank {rank['rank']} computes" for rank in ranks] + [f"node {node} sends" for node in range(nodes)]
        for line, rank in enumerate(ranks):
            compute = [(began - start, ended - began) for began, ended in rank["compute"] if start <= began < stop]
            axes.broken_barh(compute, (line + 0.15, 0.7), color="#BBBBBB")
        for node in range(nodes):
            samples: list[list[float]] = next(
                (rank["traffic"] for rank in ranks if rank["node"] == node and rank["traffic"]), []
            )
            line = len(ranks) + node
            times, rates = _rates([sample for sample in samples if start <= sample[0] <= stop])
            most = mbit or max(rates, default=1.0) or 1.0
            heights = [line + 1 - min(rate / most, 1.0) for rate in rates]
            axes.fill_between([time - start for time in times], line + 1, heights, color=colour_of(row))
        for end in ends[-steps:]:
            axes.axvline(end - start, color="black", linewidth=0.5, ymin=0, ymax=1)
        axes.set_yticks([line + 0.5 for line in range(len(labels))], labels, fontsize=8)
        axes.set_ylim(len(labels), 0)
        title = f"{ROWS[row].title}: {1e3 * (stop - start) / steps:.0f} ms per step"
        axes.set_title(title, fontsize=9, loc="left", pad=3)
        axes.tick_params(axis="x", labelsize=8)
    all_axes[-1, 0].set_xlim(0, longest)
    all_axes[-1, 0].set_xlabel(
        f"seconds, {steps} steps of each, which end at the black lines; grey: forward and backward; coloured: share of"
        " the link's rate",
        fontsize=9,
    )
    _save(figure, path)


def _words(workload: str) -> str:
    return WORDS.get(workload, workload)


def _layout(nodes: int, ranks_per_node: int) -> str:
    def count(number: int, noun: str) -> str:
        return f"{number} {noun}{'s' * (number > 1)}"

    return f"{count(nodes, 'node')} of {count(ranks_per_node, 'rank')}"


def _spread(settings: Sequence[Sequence[Cell]]) -> str | None:
    """What the bars mean, if there are any."""
    repetitions = max(cell.repetitions for cells in settings for cell in cells)
    return f"median of up to {repetitions} runs; bars: half their range to either side" if repetitions > 1 else None


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
    figure.savefig(path, dpi=90, bbox_inches="tight", pil_kwargs={"optimize": True})
    plt.close(figure)
    print(path)
