"""Tables in Markdown, and the store of results they are made from."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.bounds import limit, transfer_seconds
from benchmarks.contenders import BOUNDS, ROWS, is_ours, same_method
from benchmarks.measure import Cell, first_to_reach
from benchmarks.papers.paired import difference
from benchmarks.workloads import WORKLOADS


def setting_name(cell: Cell) -> str:
    rate = "unlimited" if cell.mbit is None else f"{cell.mbit:g}mbit"
    return f"{cell.workload}-{cell.nodes}x{cell.ranks_per_node}-{rate}"


def save(cells: list[Cell], about: dict[str, Any], folder: Path, prefix: str = "") -> Path:
    """Write the cells of one setting; rows that an earlier run has measured and this one has not are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{prefix}{setting_name(cells[0])}.json"
    rows = {cell.row: {**cell.to_dict(), **about} for cell in cells}
    if path.exists():
        rows = {**json.loads(path.read_text()), **rows}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1) + "\n")
    partial.replace(path)
    return path


def load(folder: Path, prefix: str = "") -> list[list[Cell]]:
    """Return all settings that were stored with a prefix."""
    paths = sorted(folder.glob(f"{prefix}*-*x*-*.json"))
    return [load_one(path) for path in paths if path.name.removeprefix(prefix).split("-")[0] in WORKLOADS]


def load_one(path: Path) -> list[Cell]:
    """The cells of one setting, in the order of :data:`ROWS`, whose rows are called what they are called now."""
    names = Cell.__dataclass_fields__

    def cell(row: dict[str, Any]) -> Cell:
        found = Cell(**{key: value for key, value in row.items() if key in names})
        return replace(found, title=ROWS[found.row].title) if found.row in ROWS else found

    order = {row: place for place, row in enumerate(ROWS)}
    cells = [cell(row) for row in json.loads(path.read_text()).values()]
    return sorted(cells, key=lambda found: order.get(found.row, len(order)))


def about_this_run(command: str, note: str) -> dict[str, Any]:
    """What a reader needs to judge a number."""
    import torch

    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {
        "command": command,
        "network": note,
        "when": when,
        "torch": torch.__version__,
        "machine": platform.platform(),
    }


def table(cells: Iterable[Cell]) -> str:
    """A Markdown table, one line per row, with the ratio to DDP where DDP was measured."""
    cells = list(cells)
    ddp = _step_of(cells, "ddp")
    lines = [
        "| | nodes synchronize | ms per step | against DDP | bound | ratio | limit | synchronization, ms | its bound"
        " | MB sent per step | at least | processors |",
        "|---|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for cell in cells:
        if cell.error is not None or cell.step_ms is None:
            lines.append(f"| {cell.title} | {one_line(cell.error or 'not measured')} |" + " |" * 10)
            continue
        entries = [
            *(_how(cell), measured(cell), f"{ddp / cell.step_ms:.2f}x" if ddp else ""),
            *(_number(cell.bound_ms), _number(cell.ratio, 2), limit_of(cell)),
            *(_number(cell.sync_ms), _number(cell.sync_bound_ms)),
            *(_megabytes(cell.bytes_per_step), _megabytes(cell.bytes_needed)),
            f"{cell.processor_share:.0%}" if cell.processor_share else "",
        ]
        lines.append(f"| {cell.title} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


def quotation(cells: Iterable[Cell], rows: Sequence[str], bounds: bool = False) -> str:
    """A short table for prose: the rows that were measured, in the given order."""
    known = {cell.row: cell for cell in cells if cell.step_ms}
    ddp = _step_of(known.values(), "ddp")
    more = (" its bound | MB per node and step |", "--:|--:|") if bounds else ("", "")
    lines = [f"| | ms per step | against DDP |{more[0]}", f"|---|--:|--:|{more[1]}"]
    for cell in (known[row] for row in rows if row in known):
        assert cell.step_ms is not None
        line = f"| {cell.title} | {measured(cell)} | {ddp / cell.step_ms:.2f}x |" if ddp else f"| {cell.title} |"
        sent = f"{cell.bytes_per_step / 1e6:.1f}" if cell.bytes_per_step is not None else ""
        lines.append(line + (f" {_number(cell.bound_ms)} | {sent} |" if bounds else ""))
    return "\n".join(lines) + "\n"


def measured(cell: Cell) -> str:
    """Milliseconds per step: the median, and half the range of the repetitions if there are several."""
    assert cell.step_ms is not None
    if cell.uncertainty_ms is None:
        return _number(cell.step_ms)
    return f"{_number(cell.step_ms)} ± {cell.uncertainty_ms:.{_digits(cell.step_ms)}f}"


def limit_of(cell: Cell) -> str:
    """Which part of its bound is the longer one."""
    row = ROWS.get(cell.row)
    if row is None or row.traffic == "none" or cell.row in BOUNDS or cell.bound_ms is None or cell.bytes_needed is None:
        return ""
    return limit(row, transfer_seconds(cell.bytes_needed, cell.mbit), cell.bound_ms / 1e3)


TARGETS = {"blocking": 1.08, "overlapped": 1.10}
"""How far above its bound a row of ours may be, ..."""
TARGET_RATES = (100.0, 1000.0)
"""... on links of these rates and between them."""


def summary(settings: Iterable[Sequence[Cell]]) -> str:
    """Per setting: is anything slower than DDP, above its target, or behind what does the same?"""
    blocking, overlapped = (f"{name} rows within {target:.2f} of their bounds" for name, target in TARGETS.items())
    lines = [
        f"| setting | rows of ours no slower than DDP | {blocking} | {overlapped} |"
        " ahead of the same method of others |",
        "|---|---|---|---|---|",
    ]
    for cells in settings:
        ours = [cell for cell in cells if cell.step_ms and cell.row in ROWS and is_ours(cell.row)]
        ddp = next((cell for cell in cells if cell.row == "ddp" and cell.step_ms), None)
        if not ours:
            continue
        slower = [cell for cell in ours if ddp and (cell.step_ms or 0) > (ddp.step_ms or 0)]
        entries = [
            _of(len(ours), [f"{cell.title}: {measured(cell)} against {measured(ddp)} ms" for cell in slower])
            if ddp
            else "DDP was not measured"
        ]
        for bound, target in TARGETS.items():
            judged = [cell for cell in ours if ROWS[cell.row].bound == bound and cell.ratio]
            above = [f"{cell.title}: {cell.ratio:.2f}" for cell in judged if round(cell.ratio or 0, 2) > target]
            entries.append(_of(len(judged), above) + ("" if _has_target(cells[0]) else " (no target)") * bool(judged))
        pairs = same_methods(cells)
        behind = [
            f"{mine.title}: {measured(mine)} against {measured(peer)} ms of {peer.title}"
            for mine, peer in pairs
            if (mine.step_ms or 0) > (peer.step_ms or 0)
        ]
        entries.append(_of(len(pairs), behind) + _loops(cells) * bool(behind))
        lines.append(f"| {setting_words(cells[0])} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


def same_methods(cells: Iterable[Cell]) -> list[tuple[Cell, Cell]]:
    """Our rows, and the peers' that do the same."""
    known = {cell.row: cell for cell in cells if cell.step_ms}
    return [
        (cell, known[peer])
        for cell in known.values()
        for peer in same_method(cell.row, cell.ranks_per_node)
        if peer in known
    ]


def _loops(cells: Iterable[Cell]) -> str:
    """What a Trainer costs: most peers are loops of their own."""
    alone = {cell.row: cell for cell in cells if cell.row in ("loop", "local") and cell.step_ms}
    if len(alone) < 2:
        return ""
    return (
        f" (without communication a step takes {measured(alone['loop'])} ms in Lightning's loop,"
        f" {measured(alone['local'])} ms in theirs)"
    )


def _has_target(cell: Cell) -> bool:
    return cell.mbit is not None and TARGET_RATES[0] <= cell.mbit <= TARGET_RATES[1]


def _of(count: int, exceptions: Sequence[str]) -> str:
    if not count:
        return ""
    return f"{count - len(exceptions)} of {count}" + ("; not " + ", ".join(exceptions)) * bool(exceptions)


def _how(cell: Cell) -> str:
    row = ROWS.get(cell.row)
    if row is None or row.traffic == "none":
        return ""
    return ("every step" if row.period == 1 else f"every {row.period} steps") + f", {row.bound}"


def _step_of(cells: Iterable[Cell], row: str) -> float | None:
    return next((cell.step_ms for cell in cells if cell.row == row and cell.step_ms), None)


def overheads(cells: Iterable[Cell]) -> str:
    """Time per step above the same loop without communication: Lightning's loop, or the hand-written one."""
    measured = {cell.row: cell for cell in cells if cell.step_ms is not None}
    lines = []
    for cell in measured.values():
        loop = "local" if ROWS[cell.row].module in ("plain", "torch_hierarchical") else "loop"
        base = measured.get(loop)
        if cell.row in ("loop", *BOUNDS) or base is None or ROWS[cell.row].venv != "main":
            continue
        assert cell.step_ms is not None
        assert base.step_ms is not None
        lines.append(f"{cell.title}: {cell.step_ms - base.step_ms:.3f} ms per step above {base.title!r}")
    return "\n".join(lines) + "\n"


def accuracy_table(curves: dict[str, list[dict[str, float]]], errors: dict[str, str], target: float) -> str:
    """Final loss and accuracy, and the time and the bytes to a target; all of them means over the seeds."""
    lines = [
        "| | last loss | between seeds | last accuracy | best | seconds | MB sent |"
        f" seconds to {target:.3f} | MB to {target:.3f} |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row, curve in curves.items():
        there, last = first_to_reach(curve, target), curve[-1]
        best = max(point["accuracy"] for point in curve)
        reached = f"{there['seconds']:.2f} | {there['bytes'] / 1e6:.1f}" if there else "not reached | "
        spent = f"{last['seconds']:.2f} | {last['bytes'] / 1e6:.1f}"
        loss = f"{last['loss']:.3f} | {last['loss_spread']:.3f}"
        lines.append(f"| {ROWS[row].title} | {loss} | {last['accuracy']:.3f} | {best:.3f} | {spent} | {reached} |")
    lines += [f"| {ROWS[row].title} | {one_line(error)} |{' |' * 7}" for row, error in errors.items()]
    return "\n".join(lines) + "\n"


def sooner_table(runs: Mapping[str, Sequence[list[dict[str, float]]]], target: float, baseline: str = "ddp") -> str:
    """Return how many times sooner than the baseline each row first reaches an accuracy.

    Args:
        runs: Learning curves by row, in the order of seeds.
        target: The accuracy.
        baseline: The row that is compared with.
    """
    seconds = {
        row: {seed: _seconds_until(curve, target) for seed, curve in enumerate(curves)} for row, curves in runs.items()
    }
    return _sooner(seconds, f"reach {target:.3f}", baseline)


def sooner_to_loss(runs: Mapping[str, Sequence[list[dict[str, float]]]], step: int, baseline: str = "ddp") -> str:
    """Return how many times sooner each row first reaches the loss that the baseline of its seed has after some steps.

    Args:
        runs: Learning curves by row, in the order of seeds.
        step: Of the baseline.
        baseline: The row that is compared with.
    """
    targets = [next(point["loss"] for point in curve if point["step"] == step) for curve in runs[baseline]]
    seconds = {
        row: {
            seed: _seconds_until(curve, target, "loss")
            for seed, (curve, target) in enumerate(zip(curves, targets, strict=True))
        }
        for row, curves in runs.items()
    }
    return _sooner(seconds, f"reach the loss of step {step}", baseline)


def _seconds_until(curve: list[dict[str, float]], target: float, measure: str = "accuracy") -> float | None:
    there = first_to_reach(curve, target, measure)
    return there["seconds"] if there else None


def _sooner(seconds: Mapping[str, Mapping[int, float | None]], what: str, baseline: str) -> str:
    """Return a table of the seconds by row and seed."""
    logarithms = {
        row: {seed: None if value is None else math.log(value) for seed, value in by_seed.items()}
        for row, by_seed in seconds.items()
    }
    lines = [
        f"| | seeds that {what} | seconds until then | times sooner than {ROWS[baseline].title}, 95 % |",
        "|---|--:|--:|--:|",
    ]
    for row, by_seed in seconds.items():
        reached = [value for value in by_seed.values() if value is not None]
        mean = f"{statistics.mean(reached):.2f}" if reached else "never"
        ratio = ""
        apart = difference(logarithms.get(baseline, {}), logarithms[row])
        if row != baseline and apart.pairs:
            ratio = f"{math.exp(apart.mean):.2f}"
            if apart.pairs > 1:
                ratio += f", from {math.exp(apart.low):.2f} to {math.exp(apart.high):.2f}"
        lines.append(f"| {ROWS[row].title} | {len(reached)} of {len(by_seed)} | {mean} | {ratio} |")
    return "\n".join(lines) + "\n"


WORDS = {
    "mlp11m": "a perceptron of 11 M parameters",
    "mlp1m": "a perceptron of 1 M parameters",
    "mlp85k": "a perceptron of 85 k parameters",
    "digits": "handwritten digits",
    "digits10m": "handwritten digits, by a perceptron of 10 M parameters",
    "characters": "a character model",
    "characters_adamw": "a character model with AdamW",
    "bytes": "a byte language model of 1.45 M parameters",
}
"""Workloads, for titles."""


def layout_words(nodes: int, ranks_per_node: int) -> str:
    def count(number: int, noun: str) -> str:
        return f"{number} {noun}{'s' * (number > 1)}"

    return f"{count(nodes, 'node')} of {count(ranks_per_node, 'rank')}"


def setting_words(cell: Cell) -> str:
    """What was trained, on what, over what."""
    rate = "no limit of rate" if cell.mbit is None else f"{cell.mbit:g} Mbit/s"
    work = WORDS.get(cell.workload, cell.workload)
    return f"{work}, {layout_words(cell.nodes, cell.ranks_per_node)}, {rate}"


def in_order(settings: Iterable[list[Cell]]) -> list[list[Cell]]:
    """By workload and layout, and then from slow links to fast ones."""

    def place(cells: list[Cell]) -> tuple[int, str, int, float]:
        first = cells[0]
        return -first.ranks_per_node, first.workload, -first.nodes, first.mbit or float("inf")

    return sorted(settings, key=place)


def full_report(folder: Path) -> str:
    """All stored settings as one Markdown document, with a summary before them."""
    settings = in_order(load(folder))
    parts = [
        "# Benchmark results\n",
        "`python -m benchmarks report` writes this page from the JSON files next to it; [how to read it](../README.md)."
        " Medians of the repetitions, ± half their range; what has none ran once.\n",
        "## Summary\n",
        f"Targets, on links of {TARGET_RATES[0]:g} to {TARGET_RATES[1]:g} Mbit/s: no row of ours slower than DDP; rows"
        f" that wait for a synchronization within {TARGETS['blocking']:.2f} of their bounds, rows that overlap it"
        f" within {TARGETS['overlapped']:.2f}; ahead of every peer that does the same.\n",
        summary(settings),
    ]
    for cells in settings:
        words = setting_words(cells[0])
        parts += [f"## {capitalised(words)}\n", _measured_when(cells), table(cells)]
        pairs = same_methods(cells)
        if pairs:
            parts += ["The same method, ours and others':\n", _pairs(pairs)]
    return "\n".join(parts)


def _measured_when(cells: Sequence[Cell]) -> str:
    days = sorted({cell.when[:10] for cell in cells if cell.when})
    return f"Measured on {' and '.join(days)}.\n" if days else ""


def _pairs(pairs: Iterable[tuple[Cell, Cell]]) -> str:
    lines = ["| ours | ms per step | theirs | ms per step | theirs / ours |", "|---|--:|---|--:|--:|"]
    for mine, peer in pairs:
        ratio = (peer.step_ms or 0.0) / (mine.step_ms or 1.0)
        lines.append(f"| {mine.title} | {measured(mine)} | {peer.title} | {measured(peer)} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def _digits(value: float) -> int:
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2


def _number(value: float | None, digits: int | None = None) -> str:
    return "" if value is None else f"{value:.{_digits(value) if digits is None else digits}f}"


def _megabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:.2f}"


def capitalised(words: str) -> str:
    """Words as they begin a sentence."""
    return f"{words[0].upper()}{words[1:]}"


def one_line(text: str) -> str:
    """As a table's cell can hold it."""
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= 160 else line[:157] + "..."
