"""Print a plan as a table, JSON, or YAML for LightningCLI."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from lightning_hiercomm.planning.predict.candidates import Plan, Row
from lightning_hiercomm.planning.quantities import shown_bytes, shown_seconds

_COLUMNS = (
    *("configuration", "between nodes", "step", "exposed", "per node", "memory", "speed-up", "limit", "apart"),
    "accuracy",
)


def table(plan: Plan, everything: bool = False) -> str:
    """Return a text table with one line per configuration."""
    rows = plan.rows if everything else plan.best_of_each()
    lines = [_COLUMNS, *(_cells(row, row is plan.chosen) for row in rows)]
    absent = [f"not in the table: {name}: {reason}" for name, reason in plan.left_out().items()]
    return "\n".join([aligned(lines, left=(0, 1)), *absent])


def aligned(lines: list[tuple[str, ...]], left: tuple[int, ...]) -> str:
    """Return lines of cells as columns; the first line is the header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in lines
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def _cells(row: Row, is_chosen: bool) -> tuple[str, ...]:
    prediction = row.prediction
    return (
        f"{'>' if is_chosen else ' '} {row.candidate.title}",
        row.candidate.wire_dtype or "as it is",
        shown_seconds(prediction.seconds),
        shown_seconds(prediction.exposed_seconds),
        shown_bytes(prediction.inter_bytes),
        shown_bytes(prediction.memory_bytes) + ("" if row.fits else " !"),
        f"{row.speedup:.2f}x",
        prediction.limit,
        f"{row.drift:g}",
        str(row.accuracy),
    )


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return everything as values for JSON; bytes and seconds are per step, of a node and of a rank."""
    return {
        "nodes": plan.cluster.nodes,
        "ranks_per_node": plan.cluster.ranks_per_node,
        "workload": asdict(plan.workload),
        "step_seconds_on_one_node": plan.alone,
        "target": plan.target,
        "speeds": list(plan.speeds),
        "rows": [_row_to_dict(row) for row in plan.rows],
        "left_out": plan.left_out(),
        "recommended": _row_to_dict(plan.chosen),
        "reason": plan.reason,
        "yaml": yaml(plan),
    }


def _row_to_dict(row: Row) -> dict[str, Any]:
    return {
        "scheme": row.candidate.name,
        "arguments": dict(row.candidate.arguments),
        "wire_dtype": row.candidate.wire_dtype,
        **asdict(row.prediction),
        "speedup": row.speedup,
        "overhead": row.overhead,
        "steps_apart": row.drift if math.isfinite(row.drift) else None,
        "fits": row.fits,
        "accuracy": str(row.accuracy),
    }


def yaml(plan: Plan) -> str:
    """Return the recommended configuration as LightningCLI reads it (``--config FILE``)."""
    candidate = plan.chosen.candidate
    lines = [
        "trainer:",
        f"  num_nodes: {plan.cluster.nodes}",
        f"  devices: {plan.cluster.ranks_per_node}",
    ]
    if candidate.kind is None:
        return "\n".join([*lines, "  strategy: ddp"]) + "\n"
    lines += ["  strategy:", "    class_path: lightning_hiercomm.HierarchicalStrategy", "    init_args:"]
    if candidate.wire_dtype is not None:
        lines.append(f"      wire_dtype: {candidate.wire_dtype}")
    lines += ["      scheme:", f"        class_path: lightning_hiercomm.{candidate.name}"]
    if candidate.arguments:
        lines.append("        init_args:")
        for name, value in candidate.arguments.items():
            lines.append(f"          {name}: {str(value).lower() if isinstance(value, bool) else value}")
    return "\n".join(lines) + "\n"
