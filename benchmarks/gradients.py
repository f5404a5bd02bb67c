"""How close the step time of all-reduced gradients comes to its bound, by what they look like between nodes."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.bounds import transfer_seconds
from benchmarks.contenders import BOUNDS
from benchmarks.measure import Cell

ROWS = ("ddp", "all_reduce", "all_reduce_bf16", "all_reduce_int8", "all_reduce_int4")
RATES = (100.0, 500.0)


def table(cells: Iterable[Cell]) -> str:
    """A row for each type of gradients at each rate, in Markdown.

    Args:
        cells: Of any settings. Each bound was measured in the session of its row.
    """
    cells = list(cells)
    lines = [
        "| gradients | Mbit/s | ms per step | computing, ms | bytes / rate, ms | the longer one, ms | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in cells:
        if cell.row in BOUNDS:
            continue
        rate = "no limit" if cell.mbit is None else f"{cell.mbit:g}"
        if cell.step_ms is None or cell.bound_ms is None or cell.ratio is None:
            lines.append(f"| {cell.title} | {rate} | {cell.error or 'not measured'} | | | | |")
            continue
        network = 1e3 * transfer_seconds(cell.bytes_needed or 0.0, cell.mbit)
        lines.append(
            f"| {cell.title} | {rate} | {cell.step_ms:.0f} | {_computing(cell, cells):.0f} | {network:.0f} |"
            f" {cell.bound_ms:.0f} | {cell.ratio:.2f} |"
        )
    return "\n".join(lines)


def _computing(cell: Cell, cells: Iterable[Cell]) -> float:
    """Milliseconds of a step whose gradients are averaged inside nodes only, by the faster way to do so."""
    place = (cell.workload, cell.nodes, cell.ranks_per_node, cell.mbit)
    bases = ("node", "node_shared") if cell.ranks_per_node > 1 else ("local",)
    return min(
        base.step_ms
        for base in cells
        if base.row in bases
        and base.step_ms is not None
        and (base.workload, base.nodes, base.ranks_per_node, base.mbit) == place
    )
