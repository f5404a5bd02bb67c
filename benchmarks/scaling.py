"""Measure step time and bytes against the number of nodes, and compare them with each method's formula."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.bounds import formula
from benchmarks.contenders import BOUNDS, ROWS
from benchmarks.measure import Cell
from benchmarks.report import WORDS, capitalised, limit_of, measured, one_line

ROWS_TO_SCALE = (
    *("ddp", "all_reduce", "periodic", "daso", "diloco", "diloco_streaming"),
    *("steps_delay", "gossip_blocking", "gossip"),
)
BUSY = 0.85
"""From this share of all processors on, it is they that a row waits for, and not the link alone."""


def page(settings: Iterable[Sequence[Cell]]) -> str:
    """The table in Markdown, rows of one method together, with what the machine adds to it."""
    by_nodes = sorted(settings, key=lambda cells: cells[0].nodes)
    if not by_nodes:
        return "Nothing was measured yet: python -m benchmarks scaling\n"
    first = by_nodes[0][0]
    work = WORDS.get(first.workload, first.workload)
    rate = "no limit of rate" if first.mbit is None else f"{first.mbit:g} Mbit/s for each node's link"
    computing = ", ".join(
        f"{cell.nodes} ranks {measured(cell)} ms" for cells in by_nodes for cell in cells if cell.row == "local"
    )
    busy = [cell for cells in by_nodes for cell in cells if _needs_processors(cell)]
    lines = [
        "# More nodes\n",
        f"{capitalised(work)}, nodes of one rank, {rate}: `python -m benchmarks scaling`. n is the number of"
        " nodes; the formula says what a node must send per step, in models. Bounds are computing alone, measured in"
        " the same session, and those bytes at the link's rate, as [each method](../README.md) allows.\n",
        f"All ranks share one machine's processors. Computing alone takes {computing} per step: with one processor for"
        " each rank it would not grow.",
        (
            f"Where the processors were busy for {BUSY:.0%} of the time or more they are the limit, not the link:"
            f" {', '.join(sorted({f'{cell.title} on {cell.nodes}' for cell in busy}))}.\n"
            if busy
            else f"No row kept the processors busy for {BUSY:.0%} of the time.\n"
        ),
        "| | formula | nodes | MB sent per step | by the formula | ratio | ms per step | bound | ratio | limit"
        " | processors |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|--:|",
    ]
    for row in (row for row in ROWS if row not in BOUNDS):
        found = [cell for cells in by_nodes for cell in cells if cell.row == row]
        lines += [_line(cell, named=cell is found[0]) for cell in found]
    return "\n".join(lines) + "\n"


def _line(cell: Cell, named: bool) -> str:
    name = f"| {cell.title} | {formula(ROWS[cell.row])} |" if named else "| | |"
    if cell.error is not None or cell.step_ms is None:
        return f"{name} {cell.nodes} | {one_line(cell.error or 'not measured')} |{' |' * 7}"
    sent, needed = cell.bytes_per_step or 0.0, cell.bytes_needed or 0.0
    entries = [
        *(str(cell.nodes), f"{sent / 1e6:.3f}", f"{needed / 1e6:.3f}", f"{sent / needed:.3f}" if needed else ""),
        *(measured(cell), f"{cell.bound_ms:.1f}" if cell.bound_ms else "", f"{cell.ratio:.2f}" if cell.ratio else ""),
        "processors" if _needs_processors(cell) else limit_of(cell),
        "" if cell.processor_share is None else f"{cell.processor_share:.0%}",
    ]
    return f"{name} " + " | ".join(entries) + " |"


def _needs_processors(cell: Cell) -> bool:
    return cell.row not in BOUNDS and cell.processor_share is not None and cell.processor_share >= BUSY
