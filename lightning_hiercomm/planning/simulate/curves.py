"""Print the results of simulations as a table or as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from statistics import fmean
from typing import Any

from lightning_hiercomm.planning.predict.report import aligned
from lightning_hiercomm.planning.quantities import shown_seconds
from lightning_hiercomm.planning.simulate.simulation import Curve

_COLUMNS = (
    *("replicas", "batch", "scheme", "steps", "step", "all of them", "accuracy", "best", "loss"),
    "to the first row's best",
)


def table(curves: Sequence[Curve]) -> str:
    """Return one line per experiment: the mean over the seeds that did not diverge.

    The seeds of an experiment follow each other. The first row of each number of replicas is the baseline. "to the
    first row's best" is the predicted time until the accuracy first reached the baseline's highest.
    """
    lines: list[tuple[str, ...]] = [_COLUMNS]
    for _, group in groupby(curves, key=lambda curve: curve.experiment.replicas):
        rows = [list(runs) for _, runs in groupby(group, key=lambda curve: curve.experiment.label)]
        best = [run.best.accuracy for run in rows[0] if not run.has_diverged]
        target = fmean(best) if best else math.nan  # no accuracy reaches NaN
        lines += [_cells(runs, target) for runs in rows]
    return aligned(lines, left=(2,))


def _cells(runs: list[Curve], target: float) -> tuple[str, ...]:
    experiment, ended = runs[0].experiment, [run for run in runs if not run.has_diverged]
    names = (
        str(experiment.replicas),
        str(experiment.batch * experiment.replicas),
        experiment.label,
        str(experiment.steps),
    )
    if not ended:
        return (*names, "-", "-", "diverged", *["-"] * 3)
    ends = [run.points[-1] for run in ended]
    accuracies = [100 * end.accuracy for end in ends]
    spread = f" +-{(max(accuracies) - min(accuracies)) / 2:.1f}" if len(ended) > 1 else ""
    lost = f", {len(runs) - len(ended)} of {len(runs)} diverged" if len(ended) < len(runs) else ""
    reached = [point for run in ended if (point := run.first_to_reach(target)) is not None]
    return (
        *names,
        shown_seconds(ends[0].seconds / experiment.steps),
        shown_seconds(ends[0].seconds),
        f"{fmean(accuracies):.1f} %{spread}{lost}",
        f"{100 * fmean(run.best.accuracy for run in ended):.1f} %",
        f"{fmean(end.loss for end in ends):.3f}",
        shown_seconds(fmean(point.seconds for point in reached)) if len(reached) == len(ended) else "-",
    )


def to_dict(curves: Iterable[Curve]) -> list[dict[str, Any]]:
    """Return everything as values for JSON; seconds are predicted, except ``took``."""
    return [
        {
            "label": curve.experiment.label,
            "scheme": repr(curve.experiment.scheme),
            "task": curve.experiment.task.name,
            "nodes": curve.experiment.nodes,
            "ranks_per_node": curve.experiment.ranks_per_node,
            "batch": curve.experiment.batch,
            "learning_rate": curve.experiment.learning_rate,
            "wire_dtype": curve.experiment.wire_dtype,
            "seed": curve.experiment.seed,
            "steps": curve.experiment.steps,
            "diverged": curve.has_diverged,
            "points": [asdict(point) for point in curve.points if math.isfinite(point.loss)],
            "inter_bytes_per_step": curve.inter_bytes if math.isfinite(curve.inter_bytes) else None,
            "took": curve.took,
        }
        for curve in curves
    ]
