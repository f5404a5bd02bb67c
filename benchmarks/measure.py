"""From jobs to numbers: which steps to run, and what their records say."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import bounds
from benchmarks.contenders import BOUNDS, IN_NODE, ROWS
from benchmarks.job import Job, Record
from benchmarks.workloads import WORKLOADS, parameter_count


@dataclass(frozen=True)
class Cell:
    """One row of the table at one setting: medians over the repetitions of one session.

    Args:
        step_ms: Milliseconds per step.
        step_ms_each: The same of every repetition. Results of earlier versions have none, only ``spread_ms``, the
            largest less the smallest.
        bound_ms: What no method of this kind can beat; ``ratio`` is ``step_ms / bound_ms``.
        sync_ms: How much longer a step with a synchronization takes than one without; None for rows that overlap them.
        sync_bound_ms: Network time of one synchronization.
        bytes_per_step: Bytes the busiest node sent per step, headers included.
        bytes_needed: Bytes the method has to send per node and step.
        disagreement: Largest relative distance of a rank's parameters from the mean, at the end.
        messages: Messages between nodes per step and rank.
        last_loss: Loss of the last step on rank 0.
        peak_models: The largest memory of a rank on its GPU, in float32 models.
        processor_share: How busy all processors of the machine were, of 1.
        error: Why there is no measurement.
        when: Time of the measurement in ISO 8601; empty before it is stored.
    """

    row: str
    title: str
    workload: str
    nodes: int
    ranks_per_node: int
    mbit: float | None
    repetitions: int = 0
    step_ms: float | None = None
    spread_ms: float | None = None
    bound_ms: float | None = None
    ratio: float | None = None
    sync_ms: float | None = None
    sync_bound_ms: float | None = None
    sync_ratio: float | None = None
    bytes_per_step: float | None = None
    bytes_needed: float | None = None
    disagreement: float | None = None
    messages: float | None = None
    last_loss: float | None = None
    peak_models: float | None = None
    error: str | None = None
    step_ms_each: list[float] = field(default_factory=list)
    processor_share: float | None = None
    when: str = ""

    @property
    def uncertainty_ms(self) -> float | None:
        """Half the range of the repetitions; None if there is but one."""
        return None if self.repetitions < 2 or self.spread_ms is None else self.spread_ms / 2

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def speed_job(
    row_key: str, workload: str, repetition: int, periods: int, least_steps: int, timeout: float, device: str = "cpu"
) -> Job:
    """A job of whole periods: at least ``periods`` of them and ``least_steps`` steps.

    Warm-up takes one period, and another one where the traffic of the first is still under way at its end.
    """
    row = ROWS[row_key]
    period = row.period
    steps = period * max(periods, -(-least_steps // period))
    warmup = period * max(2 if row.bound == "overlapped" else 1, -(-3 // period))
    return Job(
        f"{row_key}.{repetition}", row_key, workload, warmup, steps, timeout=timeout, seed=repetition, device=device
    )


def seconds_per_step(job: Job, records: Iterable[Record]) -> float:
    """Mean time of the steps on the clock, of the slowest rank."""
    return max((record.step_ends[-1] - record.step_ends[job.warmup - 1]) / job.steps for record in records)


def synchronization_seconds(job: Job, records: Iterable[Record], period: int) -> float | None:
    """Median time of the steps that synchronize, less the median of the others; None if every step synchronizes.

    A step lasts from the end of the step before it on the last rank to its own end on the last rank: waiting for a late
    rank is not part of a synchronization. The steps that synchronize are at one place in the period, the longest one.
    """
    if period == 1:
        return None
    ends: list[float] = [max(of_ranks) for of_ranks in zip(*(record.step_ends for record in records), strict=True)]
    times = [ends[step] - ends[step - 1] for step in range(job.warmup, job.warmup + job.steps)]
    places = [statistics.median(times[place::period]) for place in range(period)]
    return max(places) - statistics.median(places)


def cells(
    jobs: list[Job], results: dict[str, list[Record]], nodes: int, ranks_per_node: int, mbit: float | None
) -> list[Cell]:
    """Summarise one session. The compute bounds come from the session's own bound rows."""
    parameters = parameter_count(WORKLOADS[jobs[0].workload].model())
    by_row: dict[str, list[Job]] = {}
    for job in jobs:
        by_row.setdefault(job.row, []).append(job)

    times: dict[str, list[float]] = {}
    for key, repeated in by_row.items():
        good = [job for job in repeated if not any(record.error for record in results[job.id])]
        times[key] = [seconds_per_step(job, results[job.id]) for job in good]
    bases = {key: statistics.median(times[key]) for key in BOUNDS if times.get(key)}
    in_node = min((bases[key] for key in IN_NODE if key in bases), default=None)

    found = []
    for key, repeated in by_row.items():
        row = ROWS[key]
        setting = (key, row.title, repeated[0].workload, nodes, ranks_per_node, mbit)
        if not times[key]:
            errors = [record.error for job in repeated for record in results[job.id] if record.error]
            found.append(Cell(*setting, error=errors[0]))
            continue
        good = [job for job in repeated if not any(record.error for record in results[job.id])]
        records = [record for job in good for record in results[job.id]]
        step = statistics.median(times[key])
        bound = None
        compute = in_node if row.averages_in_node and ranks_per_node > 1 else bases.get("local", in_node)
        if key in ("link", *IN_NODE):
            compute = 0.0 if key == "link" else bases[key]
        if compute is not None:
            bound = bounds.step_seconds(row, parameters, nodes, mbit, compute)
        blocking = row.bound == "blocking"
        sync = [synchronization_seconds(job, results[job.id], row.period) for job in good] if blocking else []
        synchronizations = [seconds for seconds in sync if seconds is not None]
        if blocking and row.period == 1 and compute is not None:
            synchronizations = [seconds - compute for seconds in times[key]]
        needed = bounds.bytes_per_step(row, parameters, nodes)
        network = bounds.transfer_seconds(needed * row.period, mbit)
        synchronization = statistics.median(synchronizations) if synchronizations else None
        busiest = [max(record.window_bytes for record in results[job.id]) / job.steps for job in good]
        busy = [record.window_busy_share for record in records if record.window_busy_share is not None]
        apart = [record.disagreement for record in records if record.disagreement is not None]
        found.append(
            Cell(
                *setting,
                repetitions=len(good),
                step_ms=1e3 * step,
                spread_ms=1e3 * (max(times[key]) - min(times[key])),
                bound_ms=None if bound is None else 1e3 * bound,
                ratio=None if not bound else step / bound,
                sync_ms=None if synchronization is None else 1e3 * synchronization,
                sync_bound_ms=1e3 * network if synchronization is not None and network else None,
                sync_ratio=synchronization / network if synchronization is not None and network else None,
                bytes_per_step=statistics.median(busiest),
                bytes_needed=needed,
                disagreement=max(apart) if apart else None,
                messages=records[0].messages,
                last_loss=records[0].last_loss,
                peak_models=max((record.peak_models for record in records if record.peak_models), default=None),
                step_ms_each=[1e3 * seconds for seconds in times[key]],
                processor_share=statistics.median(busy) if busy else None,
            )
        )
    return found


def learning_curve(records: list[Record]) -> list[dict[str, float]]:
    """Held-out accuracy and loss over seconds and bytes since the first step; of rank 0, whose node stands for all."""
    first = next(record for record in records if record.rank == 0)
    return [
        {
            "step": point["step"],
            "seconds": point["seconds"] - first.began,
            "bytes": point["bytes"] - first.bytes_at_begin,
            "accuracy": point["accuracy"],
            "loss": point["loss"],
        }
        for point in first.evaluations
    ]


def mean_curve(curves: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """The mean of the runs with several seeds, point by point; ``loss_spread``: the largest loss less the smallest."""
    return [
        {
            **{name: statistics.mean(point[name] for point in points) for name in points[0]},
            "loss_spread": max(point["loss"] for point in points) - min(point["loss"] for point in points),
        }
        for points in zip(*curves, strict=True)
    ]


def first_to_reach(curve: list[dict[str, float]], target: float, measure: str = "accuracy") -> dict[str, float] | None:
    """The first point of a curve at or above an accuracy, or at or below a loss."""
    sign = -1 if measure == "loss" else 1
    return next((point for point in curve if sign * point[measure] >= sign * target), None)
