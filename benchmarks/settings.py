"""What to measure where, how long that takes, and what of it is known already."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from benchmarks import bounds
from benchmarks.contenders import IN_NODE, ROWS
from benchmarks.job import Job
from benchmarks.measure import Cell, speed_job
from benchmarks.workloads import WORKLOADS, parameter_count

OURS = (
    *("all_reduce", "periodic", "daso", "daso_stale", "diloco", "diloco_streaming"),
    *("steps_delay", "gossip_blocking", "gossip"),
)
NARROW = ("all_reduce_bf16", "periodic_bf16", "daso_stale_bf16", "steps_delay_bf16", "gossip_bf16")
ALONE = ("periodic_alone", "diloco_alone", "diloco_streaming_alone")
PEERS = (
    *("post_local_hook", "torch_hierarchical", "hand", "accelerate"),
    *("torchft_local_sgd", "torchft_diloco", "torchft_streaming"),
)
QUOTED = (
    *("loop", "hand1", "post_local", "periodic1", "periodic1_bf16", "daso_bf16"),
    *("all_reduce_int8", "all_reduce_int4", "periodic_int8", "diloco_int8"),
)
"""What only the documentation's own setting has, besides."""


@dataclass(frozen=True)
class Setting:
    """One workload on one layout at one rate, and the rows to measure there."""

    workload: str
    nodes: int
    ranks_per_node: int
    mbit: float | None
    rows: tuple[str, ...]
    device: str = "cpu"

    def __str__(self) -> str:
        rate = "no limit of rate" if self.mbit is None else f"{self.mbit:g} Mbit/s"
        return f"{self.workload}, {self.nodes}x{self.ranks_per_node}, {rate}"

    @property
    def bases(self) -> tuple[str, ...]:
        """The compute bounds, which every session measures."""
        if self.device == "cuda":
            return ("node_shared",)  # both nodes compute on one GPU
        return ("local", *IN_NODE) if self.ranks_per_node > 1 else ("local",)


_RATES = (500.0, 1000.0, 100.0, 10000.0)  # what is quoted comes first
_TWO = tuple(
    Setting(
        "mlp11m",
        2,
        2,
        rate,
        ("link", "ddp", *OURS, *NARROW * (rate in (500, 1000)), *QUOTED * (rate == 500), *ALONE, *PEERS),
    )
    for rate in _RATES
)
_FOUR = tuple(Setting("mlp1m", 4, 1, rate, ("link", "loop", "ddp", *OURS, *NARROW, *PEERS)) for rate in _RATES)
PRESETS: Mapping[str, tuple[Setting, ...]] = {"2x2": _TWO, "4x1": _FOUR, "all": _TWO + _FOUR}
"""Settings by name: 11 M parameters on two nodes of two ranks, 1 M on four nodes of one."""

# guesses of what a rank adds on two processor cores:
_SECONDS_TO_START = 4.0  # the processes of one environment, with their imports
_SECONDS_AROUND_A_JOB = 0.35
_COMPUTE_SECONDS = 3e-9  # to a step, per parameter


def expected_seconds(key: str, setting: Setting, known: Mapping[str, Cell]) -> float:
    """Of one step: what was measured before, else a little more than the bound."""
    if key in known and known[key].step_ms:
        return (known[key].step_ms or 0.0) / 1e3
    parameters = parameter_count(WORKLOADS[setting.workload].model())
    compute = _COMPUTE_SECONDS * parameters * setting.nodes * setting.ranks_per_node
    return 1.25 * bounds.step_seconds(ROWS[key], parameters, setting.nodes, setting.mbit, compute)


@dataclass(frozen=True)
class Batch:
    """Rows that are measured in one session, with the bases before each repetition, and the time that will take."""

    setting: Setting
    jobs: tuple[Job, ...]
    rows: tuple[str, ...]
    seconds: float


def batches(
    setting: Setting,
    rows: Sequence[str],
    known: Mapping[str, Cell],
    repetitions: int,
    steps_of: Callable[[float], int],
    periods: int,
    timeout: float,
    longest: float,
) -> Iterator[Batch]:
    """Divide the rows of a setting into sessions, whose results are stored one by one.

    Args:
        setting: Where.
        rows: Which of its rows; the bases are added to each session.
        known: What was measured before, to judge the time by.
        repetitions: Of every row.
        steps_of: How many steps of so many seconds each go on the clock, at the least.
        periods: On the clock, at the least.
        timeout: Seconds after which a row counts as hung; rows that are expected to take long get more.
        longest: Seconds that a session may take, unless one row takes more.
    """

    ranks = setting.nodes * setting.ranks_per_node

    def jobs_of(key: str) -> tuple[list[Job], float]:
        step = expected_seconds(key, setting, known)
        first = speed_job(key, setting.workload, 0, periods, steps_of(step), timeout, setting.device)
        seconds = step * first.total_steps + _SECONDS_AROUND_A_JOB * ranks
        limit = max(timeout, 4 * seconds)
        jobs = [replace(first, id=f"{key}.{n}", seed=n, timeout=limit) for n in range(repetitions)]
        return jobs, seconds * repetitions

    starting = _SECONDS_TO_START * ranks
    bases = [jobs_of(key) for key in setting.bases]
    beginning = starting + sum(seconds for _, seconds in bases)
    chosen: list[tuple[str, list[Job], float]] = []

    def close() -> Batch:
        venvs = {ROWS[key].venv for key, _, _ in chosen} - {"main"}
        in_turn = [
            jobs[n] for n in range(repetitions) for jobs in (*(jobs for jobs, _ in bases), *(j for _, j, _ in chosen))
        ]
        seconds = beginning + len(venvs) * starting + sum(seconds for _, _, seconds in chosen)
        return Batch(setting, tuple(in_turn), tuple(key for key, _, _ in chosen), seconds)

    for key in rows:
        if key in setting.bases:
            continue
        jobs, seconds = jobs_of(key)
        if chosen and beginning + sum(taken for _, _, taken in chosen) + seconds > longest:
            yield close()
            chosen = []
        chosen.append((key, jobs, seconds))
    if chosen or any(key in setting.bases for key in rows):
        yield close()


def unknown_rows(rows: Iterable[str], known: Mapping[str, Cell], repetitions: int, since: datetime | None) -> list[str]:
    """The rows that were not measured yet, not often enough, with an error, or before ``since``."""

    def is_known(key: str) -> bool:
        cell = known.get(key)
        if cell is None or len(cell.step_ms_each) < repetitions:
            return False
        return since is None or (bool(cell.when) and datetime.fromisoformat(cell.when) >= since)

    return [key for key in rows if not is_known(key)]


def moment(text: str) -> datetime:
    """Read a date, or a date and time; the default time zone is UTC."""
    when = datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=timezone.utc)


def clock_steps(fixed: int | None, seconds: float) -> Callable[[float], int]:
    """Either a fixed number of steps, or as many as take some seconds and three at the least."""
    return lambda step: fixed or max(3, math.ceil(seconds / step) if step else 3)


class TimeLeft:
    """What is left of the estimates, corrected by how wrong they have been."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._left = sum(batch.seconds for batch in batches)
        self._errors: list[float] = []

    @property
    def seconds(self) -> float:
        return max(0.0, self._left) * self._correction

    def of(self, batch: Batch) -> float:
        """Seconds that a batch will take."""
        return batch.seconds * self._correction

    def done(self, batch: Batch, seconds: float) -> None:
        self._left -= batch.seconds
        self._errors.append(seconds / batch.seconds)

    @property
    def _correction(self) -> float:
        return statistics.fmean(self._errors[-5:]) if self._errors else 1.0
