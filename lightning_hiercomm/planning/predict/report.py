"""A plan for people, for programs, for LightningCLI, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_hiercomm.planning.cluster import PlanningError
from lightning_hiercomm.planning.predict.candidates import Plan, Row
from lightning_hiercomm.planning.predict.cost import predict
from lightning_hiercomm.planning.predict.faults import Faults, advice, survive
from lightning_hiercomm.planning.quantities import shown_bytes, shown_price, shown_seconds

_COLUMNS = (
    *("configuration", "between nodes", "step", "exposed", "per node", "memory", "speed-up", "limit", "apart"),
    "accuracy",
)
_COLUMNS_WITH_FAULTS = ("kept, elastic", "kept, restarts")
_COLUMNS_WITH_COSTS = ("cost, elastic", "cost, restarts")


def table(plan: Plan, everything: bool = False, faults: Faults | None = None) -> str:
    """One line per configuration, and one per scheme of which there is none.

    Args:
        plan: What is shown.
        everything: Also the settings that are not the best of their scheme.
        faults: Also what is kept where nodes die, and what the samples of 1,000 undisturbed steps cost.
    """
    rows = plan.rows if everything else plan.best_of_each()
    lines = [_COLUMNS, *(_cells(row, row is plan.chosen) for row in rows)]
    if faults is not None:
        lines = [(*cells, *more) for cells, more in zip(lines, _with_faults(plan, rows, faults), strict=True)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [_line(cells, widths) for cells in lines]
    absent = [f"not in the table: {name}, for {reason}" for name, reason in plan.left_out().items()]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:], *absent])


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


def _with_faults(plan: Plan, rows: Sequence[Row], faults: Faults) -> Iterator[tuple[str, ...]]:
    is_paid = bool(faults.price or faults.egress)
    yield _COLUMNS_WITH_FAULTS + (_COLUMNS_WITH_COSTS if is_paid else ())
    for row in rows:
        survival = survive(row, plan.cluster, plan.workload, faults)
        kept, cost = survival.elastic_goodput, survival.elastic_cost
        shown = ["-" if kept is None else f"{kept:.1%}", f"{survival.restarts_goodput:.1%}"]
        if is_paid:
            shown += ["-" if cost is None else shown_price(cost), shown_price(survival.restarts_cost)]
        yield tuple(shown)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join([*left, *right])


def to_dict(plan: Plan, faults: Faults | None = None) -> dict[str, Any]:
    """Everything, as primitives that JSON knows; bytes and seconds are per step, of a node and of a rank.

    Args:
        plan: What is shown.
        faults: Also what is kept where nodes die, and what the samples of 1,000 undisturbed steps cost.
    """
    more = {} if faults is None else {"faults": asdict(faults), "advice": advice(plan, faults)}
    return {
        "nodes": plan.cluster.nodes,
        "ranks_per_node": plan.cluster.ranks_per_node,
        "workload": asdict(plan.workload),
        "step_seconds_on_one_node": plan.alone,
        "target": plan.target,
        "rows": [_row_to_dict(plan, row, faults) for row in plan.rows],
        "left_out": plan.left_out(),
        "recommended": _row_to_dict(plan, plan.chosen, faults),
        "reason": plan.reason,
        "yaml": yaml(plan),
        **more,
    }


def _row_to_dict(plan: Plan, row: Row, faults: Faults | None) -> dict[str, Any]:
    survival = {} if faults is None else asdict(survive(row, plan.cluster, plan.workload, faults))
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
        **{name: None if value == math.inf else value for name, value in survival.items()},
    }


def yaml(plan: Plan) -> str:
    """The recommended configuration as LightningCLI reads it (``--config FILE``)."""
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
        lines += [f"          {name}: {_scalar(value)}" for name, value in candidate.arguments.items()]
    return "\n".join(lines) + "\n"


def _scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def plot(plan: Plan, path: Path) -> None:
    """What a step consists of, and how it would change with the bandwidth between nodes.

    Raises:
        PlanningError: If the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = plan.best_of_each()
    figure = Figure(figsize=(18, 5), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    names = [f"{row.candidate.title}\n{row.candidate.wire_dtype or 'as it is'}" for row in rows]
    exposed = [1e3 * row.prediction.exposed_seconds for row in rows]
    whole = [1e3 * row.prediction.seconds for row in rows]
    bars.barh(names, [all_ - part for all_, part in zip(whole, exposed, strict=True)], label="training computes")
    bars.barh(names, exposed, left=[all_ - part for all_, part in zip(whole, exposed, strict=True)], label="it waits")
    bars.axvline(1e3 * plan.alone, color="black", linestyle=":", label="one node alone")
    bars.invert_yaxis()
    bars.set_xlabel("ms per step")
    bars.set_ylabel("configuration, and what travels between nodes")
    bars.legend(**_ABOVE, ncols=3)
    factors = [2.0**power for power in range(-5, 6)]
    for row, name in zip(rows, names, strict=True):
        seconds = [_at(plan, row, factor) for factor in factors]
        rates = [8e-9 * factor * plan.cluster.inter.bandwidth for factor in factors]
        lines.loglog(rates, [1e3 * value for value in seconds], label=name.replace("\n", ", "))
    lines.axvline(8e-9 * plan.cluster.inter.bandwidth, color="black", linestyle=":", label="this cluster")
    lines.set_xlabel("Gbit/s between nodes, per node")
    lines.set_ylabel("ms per step")
    lines.legend(**_BESIDE, fontsize="small")
    figure.suptitle(
        f"{plan.cluster.nodes} nodes of {plan.cluster.ranks_per_node} ranks, {plan.workload.parameters:.3g} parameters"
    )
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlanningError(f"--plot {path}: {error}") from error


_ABOVE: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}


def _at(plan: Plan, row: Row, factor: float) -> float:
    """The step's seconds with another bandwidth between nodes."""
    cluster = plan.cluster
    world = None if cluster.world is None else cluster.world.faster(factor)
    changed = replace(cluster, inter=cluster.inter.faster(factor), world=world)
    return predict(row.candidate.scheme, changed, plan.workload, row.candidate.wire_dtype).seconds
