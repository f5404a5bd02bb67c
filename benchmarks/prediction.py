"""Predicted against measured step times."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import ROWS, Row
from benchmarks.job import Job, Record
from benchmarks.measure import seconds_per_step
from benchmarks.workloads import WORKLOADS, parameter_count
from lightning_hiercomm import schemes
from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.measure.profile import Profile
from lightning_hiercomm.planning.predict.cost import predict
from lightning_hiercomm.schemes import Scheme

PREDICTED_ROWS = ("local", "node", "ddp", "all_reduce", "periodic", "daso", "diloco_streaming", "steps_delay", "gossip")
LAYOUTS = ((2, 2), (4, 1))
RATES = (100.0, 1000.0, 10000.0)
_SECONDS_ON_THE_CLOCK = 4.0
_GUESSED_STEP = 0.06


@dataclass(frozen=True)
class Setting:
    """One layout on one network: what a probe found there, and what was measured after it.

    Args:
        workload: What was trained.
        nodes: How many.
        ranks_per_node: On each.
        mbit: Rate of each node's link.
        note: How busy the machine was.
        profiles: The probes', the first before the rows and the last after them: machines' speed drifts.
        seconds: Measured seconds per step, by row; one number per repetition.
        processor_seconds: The same of the processors' time, of the average rank.
    """

    workload: str
    nodes: int
    ranks_per_node: int
    mbit: float
    note: str
    profiles: list[dict[str, Any]]
    seconds: dict[str, list[float]]
    processor_seconds: dict[str, list[float]]


@dataclass(frozen=True)
class Compared:
    """One row of the table."""

    title: str
    setting: Setting
    measured: float
    predicted: float
    limit: str

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def workload_for(mbit: float) -> str:
    """A model whose exchange takes neither milliseconds nor minutes."""
    return "mlp1m" if mbit <= 200 else "mlp11m"


def steps_on_the_clock(key: str, workload: str, nodes: int, ranks_per_node: int, mbit: float, least: int) -> int:
    """As many as take some seconds, by a first guess: what else the machine does is not to decide."""
    row = ROWS[key]
    if key == "probe":
        return least
    scheme, wire = _scheme_of(row) if row.module == "ours" else (None, None)
    link = Link(mbit * 1e6 / 8 if mbit else math.inf)
    guess = Cluster(nodes, ranks_per_node, Link(math.inf), link)
    step = Workload.of_step(parameter_count(WORKLOADS[workload].model()), _GUESSED_STEP)
    seconds = _GUESSED_STEP if row.module == "plain" else predict(scheme, guess, step, wire).seconds
    return max(least, math.ceil(_SECONDS_ON_THE_CLOCK / seconds))


def _scheme_of(row: Row) -> tuple[Scheme, str | None]:
    scheme: Scheme = getattr(schemes, row.options["scheme"])(**row.options["arguments"])
    return scheme, row.options["strategy"].get("wire_dtype")


def setting_of(
    jobs: list[Job], results: dict[str, list[Record]], nodes: int, ranks_per_node: int, mbit: float, note: str
) -> Setting:
    """What one session found."""
    profiles = [first.profile for first, *_ in results.values() if first.profile]
    seconds: dict[str, list[float]] = {}
    processor_seconds: dict[str, list[float]] = {}
    for job in jobs:
        if job.row != "probe" and not any(record.error for record in results[job.id]):
            seconds.setdefault(job.row, []).append(seconds_per_step(job, results[job.id]))
            used = statistics.fmean(record.window_processor_seconds for record in results[job.id]) / job.steps
            processor_seconds.setdefault(job.row, []).append(used)
    if not profiles:
        raise RuntimeError("the probe failed, see the logs")
    return Setting(jobs[0].workload, nodes, ranks_per_node, mbit, note, profiles, seconds, processor_seconds)


def compare(setting: Setting) -> Iterable[Compared]:
    """Predict what was measured: the mean over what each probe predicts."""
    profiles = [Profile.from_dict(profile) for profile in setting.profiles]
    for key, seconds in setting.seconds.items():
        row = ROWS[key]
        if row.module == "plain":  # a reference, not predicted
            continue
        scheme, wire = _scheme_of(row) if row.module == "ours" else (None, None)
        predictions = [predict(scheme, profile.cluster, profile.workload, wire) for profile in profiles]
        predicted = statistics.fmean(prediction.seconds for prediction in predictions)
        yield Compared(row.title, setting, statistics.median(seconds), predicted, predictions[0].limit)


def table(compared: Iterable[Compared]) -> str:
    """A Markdown table, and how many predictions were good."""
    compared = list(compared)
    lines = [
        "| scheme | model | nodes x ranks | Mbit/s | measured, ms | predicted, ms | ratio | limit |",
        "|---|---|---|--:|--:|--:|--:|---|",
    ]
    for row in compared:
        at = row.setting
        lines.append(
            f"| {row.title} | {at.workload} | {at.nodes}x{at.ranks_per_node} | {at.mbit:g} | {1e3 * row.measured:.1f} |"
            f" {1e3 * row.predicted:.1f} | {row.ratio:.2f} | {row.limit} |"
        )
    good = sum(abs(row.ratio - 1) <= 0.1 for row in compared)
    fair = sum(abs(row.ratio - 1) <= 0.2 for row in compared)
    return "\n".join(lines) + f"\n\n{good} of {len(compared)} within 10 %, {fair} within 20 %.\n"


def save(settings: list[Setting], path: Path) -> None:
    """Write, keeping what is stored of other settings."""
    known = {_key(setting): setting for setting in (load(path) if path.exists() else [])}
    known.update({_key(setting): setting for setting in settings})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(known[key]) for key in sorted(known)], indent=1) + "\n")


def load(path: Path) -> list[Setting]:
    """What is stored."""
    return [Setting(**values) for values in json.loads(path.read_text())]


def _key(setting: Setting) -> tuple[Any, ...]:
    return setting.nodes, setting.ranks_per_node, setting.mbit, setting.workload
