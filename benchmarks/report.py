"""Tables in Markdown, and the store of results they are made from."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.contenders import BOUNDS, ROWS
from benchmarks.measure import Cell, first_to_reach


def setting_name(cell: Cell) -> str:
    rate = "unlimited" if cell.mbit is None else f"{cell.mbit:g}mbit"
    return f"{cell.workload}-{cell.nodes}x{cell.ranks_per_node}-{rate}"


def save(cells: list[Cell], about: dict[str, Any], folder: Path) -> Path:
    """Write the cells of one setting; rows that an earlier run has measured and this one has not are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{setting_name(cells[0])}.json"
    rows = {cell.row: {**cell.to_dict(), **about} for cell in cells}
    if path.exists():
        rows = {**json.loads(path.read_text()), **rows}
    path.write_text(json.dumps(rows, indent=1) + "\n")
    return path


def load(folder: Path) -> list[list[Cell]]:
    """All stored settings, each a list of cells."""
    names = Cell.__dataclass_fields__

    def cell(row: dict[str, Any]) -> Cell:
        return Cell(**{key: value for key, value in row.items() if key in names})

    paths = [path for path in sorted(folder.glob("*-*x*-*.json")) if not path.name.startswith("accuracy-")]
    settings = [json.loads(path.read_text()) for path in paths]
    return [[cell(row) for row in rows.values()] for rows in settings]


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
    ddp = next((cell.step_ms for cell in cells if cell.row == "ddp" and cell.step_ms), None)
    lines = [
        "| | ms per step | bound | ratio | agreement, ms | its bound | ratio | against DDP | MB per step | needed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in cells:
        if cell.error is not None or cell.step_ms is None:
            lines.append(f"| {cell.title} | {_one_line(cell.error or 'not measured')} |" + " |" * 8)
            continue
        faster = f"{ddp / cell.step_ms:.2f}x" if ddp else ""
        numbers = [
            *(_number(cell.step_ms), _number(cell.bound_ms), _number(cell.ratio, 2)),
            *(_number(cell.sync_ms), _number(cell.sync_bound_ms), _number(cell.sync_ratio, 2)),
            faster,
            *(_megabytes(cell.bytes_per_step), _megabytes(cell.bytes_needed)),
        ]
        lines.append(f"| {cell.title} | " + " | ".join(numbers) + " |")
    return "\n".join(lines) + "\n"


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
    """Final accuracy, and the time and the bytes to a target."""
    lines = [
        f"| | last accuracy | best | seconds | MB sent | seconds to {target:.3f} | MB to {target:.3f} |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row, curve in curves.items():
        there, last = first_to_reach(curve, target), curve[-1]
        best = max(point["accuracy"] for point in curve)
        reached = f"{there['seconds']:.2f} | {there['bytes'] / 1e6:.1f}" if there else "not reached | "
        spent = f"{last['seconds']:.2f} | {last['bytes'] / 1e6:.1f}"
        lines.append(f"| {ROWS[row].title} | {last['accuracy']:.3f} | {best:.3f} | {spent} | {reached} |")
    lines += [f"| {ROWS[row].title} | {_one_line(error)} | | | | | |" for row, error in errors.items()]
    return "\n".join(lines) + "\n"


def full_report(folder: Path) -> str:
    """All stored settings as one Markdown document."""
    parts = ["# Benchmark results\n"]
    for cells in load(folder):
        first = cells[0]
        rate = "no rate limit" if first.mbit is None else f"{first.mbit:g} Mbit/s"
        parts.append(
            f"## {first.workload}, {first.nodes} nodes x {first.ranks_per_node} ranks, {rate}\n\n{table(cells)}"
        )
    return "\n".join(parts)


def _number(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return ""
    return f"{value:.{digits if digits is not None else 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def _megabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:.2f}"


def _one_line(text: str) -> str:
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= 160 else line[:157] + "..."
