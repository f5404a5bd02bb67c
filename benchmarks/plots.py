"""Plots from stored results: they measure nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.bounds import formula
from benchmarks.contenders import BOUNDS, IN_NODE, ROWS, is_ours, is_peer
from benchmarks.measure import Cell
from benchmarks.palette import colour_of, styles_of, write_png
from benchmarks.report import WORDS, capitalised, layout_words, measured, setting_words
from benchmarks.startup import DDP, PHASES, STARTING, Start

HEADLINES = (
    ("ddp",),
    ("all_reduce",),
    ("periodic",),
    ("daso_stale", "daso"),
    ("diloco_streaming", "diloco"),
    ("steps_delay",),
    ("gossip",),
)
"""DDP and a line per family, which is the first of these that was measured at every rate."""


def step_time_against_bandwidth(settings: Sequence[Sequence[Cell]], path: Path) -> None:
    """Step time and speed-up over DDP, a line per family and the best peers; the settings are one workload and layout.

    What no method can beat is shaded: computing alone, and above it averaging gradients inside the nodes.
    """
    by_rate = [{cell.row: cell for cell in cells if cell.step_ms} for cells in settings if cells[0].mbit is not None]
    by_rate.sort(key=lambda cells: next(iter(cells.values())).mbit or 0.0)
    shared = set.intersection(*(set(cells) for cells in by_rate))
    rows = [next((row for row in family if row in shared), None) for family in HEADLINES]
    lines = [row for row in rows if row] + _best_peers(by_rate, shared)
    figure, (times, speedups) = plt.subplots(1, 2, figsize=(10.5, 4.5))
    rates = [next(iter(cells.values())).mbit or 0.0 for cells in by_rate]
    styles = styles_of(lines)
    for row in lines:
        points = [cells[row] for cells in by_rate]
        style = {"markersize": 4.5, "capsize": 2, "elinewidth": 0.8, **styles[row]}
        if is_peer(row) and row != "ddp":
            style |= {"marker": "D", "markersize": 4, "linestyle": "--"}
        half = [cell.uncertainty_ms or 0.0 for cell in points]
        step = [cell.step_ms or 0.0 for cell in points]
        times.errorbar(rates, step, yerr=half if any(half) else None, label=_label(row), **style)
        if "ddp" in shared:
            ddp = [cells["ddp"].step_ms or 0.0 for cells in by_rate]
            speedups.errorbar(rates, [base / own for base, own in zip(ddp, step, strict=True)], **style)
    _shade_compute(times, rates, by_rate)
    for axes in (times, speedups):
        axes.set(xscale="log", yscale="log", xlabel="rate of the link between nodes, Mbit/s")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
        axes.minorticks_off()
        axes.grid(True, alpha=0.25)
        axes.set_xlim(min(rates) / 1.15, max(rates) * 1.15)
    low = min(cells[row].step_ms or 1.0 for cells in by_rate for row in ("local", *lines) if row in cells)
    times.set_ylim(bottom=low / 1.6)
    _label_powers(times, "{:g}")
    _label_powers(speedups, "{:g}x")
    times.set_ylabel("milliseconds per step")
    speedups.set_ylabel("times as fast as DDP")
    first = settings[0][0]
    words = f"A training step of {WORDS.get(first.workload, first.workload)}"
    figure.suptitle(f"{words}, {layout_words(first.nodes, first.ranks_per_node)}", fontsize=12)
    figure.tight_layout()
    _legend_below(figure, times, _spread(settings))
    _save(figure, path)


def rows_of_a_setting(cells: Sequence[Cell], path: Path) -> None:
    """Draw a bar per row, the fastest at the top, with its bound; the upper axis is the speed-up over DDP."""
    known = {cell.row: cell for cell in cells if cell.step_ms}
    ddp = known["ddp"].step_ms or 1.0
    shown = [cell for row, cell in known.items() if is_ours(row) or is_peer(row)]
    shown.sort(key=lambda cell: -(cell.step_ms or 0.0))
    figure, axes = plt.subplots(figsize=(10.5, 0.27 * len(shown) + 1.6))
    for line, cell in enumerate(shown):
        peer = is_peer(cell.row)
        step = cell.step_ms or 0.0
        colour = colour_of(cell.row)
        look: dict[str, Any] = (
            {"facecolor": "white", "hatch": "////", "edgecolor": colour} if peer else {"color": colour}
        )
        axes.barh(line, step, height=0.62, **look)
        if cell.bound_ms:
            axes.barh(line, cell.bound_ms, height=0.98, color="black", alpha=0.16, linewidth=0)
        half = cell.uncertainty_ms or 0.0
        if half:
            axes.errorbar(step, line, xerr=half, color="black", capsize=2, elinewidth=0.8)
        axes.annotate(measured(cell), (step + half, line), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), [cell.title for cell in shown], fontsize=8.5)
    for label, cell in zip(axes.get_yticklabels(), shown, strict=True):
        label.set_fontweight("normal" if is_peer(cell.row) else "bold")
    longest = max((cell.step_ms or 0.0) + (cell.uncertainty_ms or 0.0) for cell in shown)
    axes.set_xlim(0, 1.12 * longest)
    axes.set_ylim(-0.6, len(shown) - 0.4)
    above = axes.secondary_xaxis(
        "top", functions=(lambda ms: ddp / _positive(ms), lambda factor: ddp / _positive(factor))
    )
    factors = [factor for factor in (1, 1.5, 2, 3, 5, 10) if factor >= ddp / (1.12 * longest)]
    above.set_xticks(factors, [f"{factor:g}x" for factor in factors])
    above.set_xlabel("times as fast as DDP", fontsize=9)
    axes.set_xlabel("ms per step; grey: the least that the method allows; bold: ours; hatched: others", fontsize=9)
    words = setting_words(cells[0])
    figure.suptitle(f"A training step of {words}", fontsize=12)
    figure.tight_layout()
    _save(figure, path)


def scaling(settings: Sequence[Sequence[Cell]], path: Path) -> None:
    """Draw step time and bytes per node, with a bar per number of nodes for every row, and the formulas."""
    settings = sorted(settings, key=lambda cells: cells[0].nodes)
    by_nodes = [{cell.row: cell for cell in cells if cell.step_ms} for cells in settings]
    nodes = [cells[0].nodes for cells in settings]
    rows = [row for row in ROWS if row not in BOUNDS and any(row in cells for cells in by_nodes)]
    figure, (times, sent) = plt.subplots(1, 2, figsize=(10.5, 0.62 * len(rows) + 1.3), sharey=True)
    height = 0.8 / len(nodes)
    for place, row in enumerate(rows):
        for nth, cells in enumerate(by_nodes):
            if row not in cells:
                continue
            cell = cells[row]
            line = place - 0.4 + (nth + 0.5) * height
            look = {"color": colour_of(row), "alpha": 0.45 + 0.55 * (nth + 1) / len(nodes), "height": 0.82 * height}
            shade = {"color": "black", "alpha": 0.18, "height": height, "linewidth": 0}
            text = {"textcoords": "offset points", "va": "center", "fontsize": 7.5}
            half = cell.uncertainty_ms or 0.0
            step, megabytes = cell.step_ms or 0.0, (cell.bytes_per_step or 0.0) / 1e6
            times.barh(line, step, **look)
            times.barh(line, cell.bound_ms or 0.0, **shade)
            if half:
                times.errorbar(step, line, xerr=half, color="black", elinewidth=0.7)
            times.annotate(measured(cell), (step + half, line), (3, 0), **text)
            sent.barh(line, megabytes, **look)
            sent.barh(line, (cell.bytes_needed or 0.0) / 1e6, **shade)
            sent.annotate(f"{megabytes:.2f}", (megabytes, line), (3, 0), **text)
    counts = ", ".join(map(str, nodes))
    times.set_yticks(
        range(len(rows)), [f"{ROWS[row].title}\nmodels sent: {formula(ROWS[row])}" for row in rows], fontsize=8.5
    )
    times.set_ylim(len(rows) - 0.45, -0.55)
    for axes, label in (
        (times, "ms per step; grey: the least that the method allows"),
        (sent, "MB that a node sends per step; grey: by the formula"),
    ):
        axes.set_xlabel(label, fontsize=9)
        axes.margins(x=0.14)
        axes.grid(True, axis="x", alpha=0.25)
        axes.tick_params(axis="y", length=0)
    first = settings[0][0]
    rate = "" if first.mbit is None else f", {first.mbit:g} Mbit/s each"
    work = WORDS.get(first.workload, first.workload)
    figure.suptitle(f"{capitalised(work)} on {counts} nodes (from top to bottom){rate}", fontsize=12)
    figure.tight_layout()
    _save(figure, path)


def startup(starts: Sequence[Start], path: Path) -> None:
    """Draw processor seconds, keys in the store and open files of a start against the number of ranks, with DDP's."""
    starts = [start for start in starts if not start.lazy_default_group] or list(starts)
    ranks = [start.ranks for start in starts]
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.6))
    for where, title, ddp, ours in (
        (
            axes[0],
            "processor seconds of all ranks",
            [start.processor_seconds[DDP] for start in starts],
            [sum(start.processor_seconds[phase] for phase in STARTING) for start in starts],
        ),
        (
            axes[1],
            "keys in requests to the store",
            [start.keys[DDP] for start in starts],
            [sum(start.keys[phase] for phase in PHASES) for start in starts],
        ),
        (
            axes[2],
            "open files of a rank",
            [start.open_files[DDP] for start in starts],
            [start.open_files["synchronization"] for start in starts],
        ),
    ):
        where.plot(ranks, ddp, marker="o", color=colour_of("ddp"), label="DDP")
        where.plot(ranks, ours, marker="o", color=colour_of("periodic"), label="ours, all of it")
        where.set_xscale("log", base=2)
        where.set_yscale("log")
        where.set_xticks(ranks, [str(number) for number in ranks])
        where.minorticks_off()
        where.set_title(title, fontsize=10)
        where.set_xlabel("ranks", fontsize=9)
        where.grid(True, alpha=0.25)
    axes[0].legend(fontsize=8.5, frameon=False)
    _save(figure, path)


def _best_peers(by_rate: Sequence[dict[str, Cell]], shared: set[str]) -> list[str]:
    """The fastest peers over all rates: of those that average inside nodes, and of those that do not."""

    def time(row: str) -> float:
        return math.prod(cells[row].step_ms or 1.0 for cells in by_rate)

    peers = sorted((row for row in shared if is_peer(row) and row != "ddp"), key=time)
    kinds = (True, False) if by_rate and next(iter(by_rate[0].values())).ranks_per_node > 1 else (None,)
    return [
        best
        for kind in kinds
        if (best := next((row for row in peers if kind in (None, ROWS[row].averages_in_node)), None)) is not None
    ]


def _label(row: str) -> str:
    return f"{ROWS[row].title} (the best of others)" if is_peer(row) and row != "ddp" else ROWS[row].title


def _shade_compute(axes: Any, where: Sequence[float], cells: Sequence[dict[str, Cell]]) -> None:
    """What no method can be below: computing, and with gradients averaged inside the nodes."""
    several = any(cell.ranks_per_node > 1 for known in cells for cell in known.values())
    edges = [where[0] / 4, *where, where[-1] * 4]
    words = ("computing, gradients averaged inside nodes", "computing alone, no communication")
    for rows, alpha, label in ((IN_NODE if several else (), 0.09, words[0]), (("local",), 0.14, words[1])):
        least = [min((known[row].step_ms or 0.0 for row in rows if row in known), default=0.0) for known in cells]
        if all(least):
            axes.fill_between(
                edges, 1e-3, [least[0], *least, least[-1]], color="black", alpha=alpha, linewidth=0, label=label
            )


def _label_powers(axes: Any, form: str) -> None:
    marks = _marks(*axes.get_ylim())
    axes.set_yticks(marks, [form.format(mark) for mark in marks])
    axes.minorticks_off()


def _marks(low: float, high: float) -> list[float]:
    return [mark * 10.0**power for power in range(-3, 7) for mark in (1, 2, 5) if low <= mark * 10.0**power <= high]


def _positive(values: Any) -> Any:
    return np.maximum(values, 1e-9)


def _legend_below(figure: Any, axes: Any, title: str | None) -> None:
    handles, labels = axes.get_legend_handles_labels()
    look = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.01), "ncols": 3, "frameon": False, "fontsize": 9}
    figure.legend(handles, labels, title=title, title_fontsize=9, **look)


def accuracy(curves: dict[str, list[dict[str, float]]], title: str, path: Path) -> None:
    """Held-out loss against time, and against bytes sent per node; the bands are as wide as the seeds are apart.

    Results of earlier versions hold no loss: then it is the accuracy.
    """
    has_loss = all("loss" in point for points in curves.values() for point in points)
    value, label = ("loss", "loss on held-out data") if has_loss else ("accuracy", "accuracy on held-out data")
    figure, (by_time, by_bytes) = plt.subplots(1, 2, figsize=(10.5, 4.5), sharey=True)
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
    words = [f"Learning {WORDS.get(workload, workload)}"]
    if "x" in layout:
        words.append(layout_words(*map(int, layout.split("x"))))
    if rate.endswith("mbit"):
        words.append("no limit of rate" if rate == "0mbit" else f"a link of {rate.removesuffix('mbit')} Mbit/s")
    figure.suptitle(", ".join(words), fontsize=12)
    for axes in (by_time, by_bytes):
        axes.grid(True, alpha=0.25)
    figure.tight_layout()
    _legend_below(figure, by_time, "bands: between seeds" if has_bands else None)
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


def _spread(settings: Sequence[Sequence[Cell]]) -> str | None:
    """What the bars mean, if there are any."""
    repetitions = max(cell.repetitions for cells in settings for cell in cells)
    return f"medians of up to {repetitions} runs; bars: half their range to either side" if repetitions > 1 else None


def _rates(samples: Sequence[Sequence[float]], window: int = 4) -> tuple[list[float], list[float]]:
    """Mbit/s between every ``window``-th sample of (time, bytes)."""
    chosen = list(samples[::window])
    pairs = [(before, after) for before, after in pairwise(chosen) if after[0] > before[0]]
    return (
        [after[0] for _, after in pairs],
        [(after[1] - before[1]) * 8e-6 / (after[0] - before[0]) for before, after in pairs],
    )


def _save(figure: Any, path: Path) -> None:
    write_png(figure, path)
    plt.close(figure)
    print(path)
