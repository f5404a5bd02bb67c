"""Two nodes on one GPU, joined by a slow network, over nccl: ``python -m benchmarks gpu-network``.

nccl refuses two ranks of one host on one GPU. It identifies hosts by a name that ``NCCL_HOSTID`` overrides, so two
processes in two network namespaces share the GPU and talk over sockets, through a token bucket. Namespaces need root,
``ip`` and ``tc``; without them the nodes talk over the loopback interface without a limit, and the table says so. The
processes take turns on the GPU by slices of some milliseconds, so a collective costs more than between two GPUs.

What is measured is stored after every session of about a minute, and a later call measures what is missing.
``--dry-run`` trains a tiny model on the CPU over gloo, to see that everything works.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.bounds import transfer_seconds
from benchmarks.contenders import BOUNDS
from benchmarks.measure import Cell
from benchmarks.settings import Setting

RESULTS = Path(__file__).parent / "results" / "gpu-network"
RATES = (10_000.0, 1_000.0)
ROWS = (
    *("ddp", "ddp_bf16_hook", "all_reduce", "all_reduce_bf16", "all_reduce_int8", "all_reduce_int4"),
    *("all_reduce_sparse2", "periodic", "diloco_streaming", "diloco_streaming_int4", "daso_stale", "gossip"),
)
"""The rows that decide most come first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what differs from ``speed``."""
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU over gloo")


def settings(rates: Iterable[float], rows: tuple[str, ...], is_dry: bool) -> list[Setting]:
    """Return one setting per rate: a GPT of 124 million parameters on two nodes of one rank."""
    workload, device = ("gpt1m", "cpu") if is_dry else ("gpt124m", "cuda")
    return [Setting(workload, 2, 1, rate or None, rows, device) for rate in rates]


def page(found: Iterable[list[Cell]], note: str) -> str:
    """Return all stored settings as Markdown: a table per rate, and what a row's bytes and computation take alone."""
    lines = ["# Two nodes on one GPU, by link rate", "", note, ""]
    for cells in sorted(found, key=lambda cells: -(cells[0].mbit or 0)):
        lines += [*_table(cells), ""]
    return "\n".join(lines)


def _table(cells: list[Cell]) -> Iterator[str]:
    first = cells[0]
    rate = "no limit of rate" if first.mbit is None else f"{first.mbit / 1000:g} Gbit/s"
    yield f"## {first.workload}, {first.nodes} nodes, {rate}"
    yield ""
    yield "| | seconds per step | against DDP | bytes alone | computing alone | messages | loss | memory, in models |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    computing = next((c.step_ms for c in cells if c.row in ("node_shared", "local") and c.step_ms), None)
    ddp = next((cell.step_ms for cell in cells if cell.row == "ddp"), None)
    for cell in cells:
        if cell.row in BOUNDS:
            continue
        if cell.step_ms is None:
            yield f"| {cell.title} | {' '.join((cell.error or 'not measured').split())} | | | | | | |"
            continue
        entries = [
            _seconds(cell.step_ms),
            f"{ddp / cell.step_ms:.2f}x" if ddp else "",
            _seconds(1e3 * transfer_seconds(cell.bytes_needed or 0.0, cell.mbit)),
            _seconds(computing),
            "" if cell.messages is None else f"{cell.messages:.0f}",
            "" if cell.last_loss is None else f"{cell.last_loss:.4f}",
            "" if cell.peak_models is None else f"{cell.peak_models:.1f}",
        ]
        yield f"| {cell.title} | {' | '.join(entries)} |"


def _seconds(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds / 1e3:.3f}"
