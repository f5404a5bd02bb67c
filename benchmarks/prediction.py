"""Step times by the model of ``plan``, against measured ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.contenders import ROWS
from benchmarks.measure import Cell
from benchmarks.workloads import WORKLOADS, parameter_count
from lightning_hiercomm.planning.plan import Choice, Cluster

SETTINGS = tuple(f"{layout}-{rate}mbit" for layout in ("mlp11m-2x2", "mlp1m-4x1") for rate in (100, 500, 1000, 10000))
_METHODS = ("ddp", "all_reduce", "periodic", "diloco")
_WIRES = {"": None, "_bf16": "bfloat16", "_int8": "int8", "_int4": "int4"}
_CHOICES = {
    f"{method}{suffix}": Choice(0, "", wire, ROWS[method].period, "", None if method == "ddp" else method)
    for method in _METHODS
    for suffix, wire in _WIRES.items()
    if method != "ddp" or wire is None
}
"""Measured rows as the model takes them."""
_LATENCY = 50e-6  # ``plan``'s default


@dataclass(frozen=True)
class Compared:
    """One row of the table."""

    cell: Cell
    modeled_ms: float

    @property
    def ratio(self) -> float:
        """The modeled time divided by the measured one."""
        assert self.cell.step_ms is not None
        return self.modeled_ms / self.cell.step_ms


def compare(folder: Path) -> Iterator[Compared]:
    """Model all stored steps of methods that ``plan`` knows."""
    for setting in SETTINGS:
        cells = {cell.row: cell for cell in report.load_one(folder / f"{setting}.json")}
        one_node = cells["node_shared" if "2x2" in setting else "local"]
        assert one_node.step_ms is not None
        assert one_node.mbit is not None
        cluster = Cluster(
            one_node.nodes,
            1e6 * one_node.mbit / 8,
            _LATENCY,
            parameter_count(WORKLOADS[one_node.workload].model()),
            one_node.step_ms / 1e3,
            one_node.ranks_per_node,
        )
        for row, choice in _CHOICES.items():
            if row in cells and cells[row].step_ms is not None:
                yield Compared(cells[row], 1e3 * cluster.seconds(choice))


def table(compared: Sequence[Compared]) -> str:
    """Markdown."""
    lines = ["| | Mbit/s | measured, ms | model, ms | ratio |", "|---|--:|--:|--:|--:|"]
    for row in compared:
        cell = row.cell
        measured, modeled = f"{cell.step_ms:.0f}", f"{row.modeled_ms:.0f}"
        lines.append(f"| {cell.title} | {cell.mbit:g} | {measured} | {modeled} | {row.ratio:.2f} |")
    return "\n".join(lines)
