"""The period that ``sync_every="auto"`` chooses, against the best one that a scan finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.contenders import ROWS, SCAN
from benchmarks.job import Job, Record
from benchmarks.measure import seconds_per_step, speed_job

SCANNABLE = tuple(SCAN)
_CHOOSES = 64  # steps until every scheme has chosen, and some more


@dataclass(frozen=True)
class Scan:
    """One scheme at one rate.

    Attributes:
        scheme: Its name.
        mbit: Rate of each node's link.
        target: The accepted overhead.
        seconds: Per step, by period.
        chosen: The period that was chosen.
        chosen_seconds: Per step, once it was.
    """

    scheme: str
    mbit: float
    target: float
    seconds: Mapping[int, float]
    chosen: int
    chosen_seconds: float

    @property
    def best(self) -> int:
        """The shortest period that exceeds the longest one's step by no more than the target."""
        longest = self.seconds[max(self.seconds)]
        return min(period for period, seconds in self.seconds.items() if seconds <= (1 + self.target) * longest)

    @property
    def ratio(self) -> float:
        """The chosen period's step against the best one's."""
        return self.chosen_seconds / self.seconds[self.best]


def jobs_of(scheme: str, workload: str, periods: Sequence[int], least_steps: int, timeout: float) -> list[Job]:
    """The scan, and the choice with several of its periods on the clock."""
    scan = [speed_job(f"{scheme}@every-{period}", workload, 0, 1, least_steps, timeout) for period in periods]
    auto = f"{scheme}@every-auto"
    return [*scan, Job(f"{auto}.0", auto, workload, _CHOOSES, max(4 * least_steps, 2 * max(periods)), timeout=timeout)]


def scan_of(
    scheme: str, jobs: Sequence[Job], results: Mapping[str, Sequence[Record]], mbit: float, target: float
) -> Scan:
    """What one session found.

    Raises:
        RuntimeError: If a job failed.
    """
    failed = {job.id: record.error for job in jobs for record in results[job.id] if record.error}
    if failed:
        raise RuntimeError(f"failed, see the logs: {failed}")
    *scan, auto = jobs
    seconds = {ROWS[job.row].period: seconds_per_step(job, results[job.id]) for job in scan}
    chosen = results[auto.id][0].period
    if chosen is None:
        raise RuntimeError(f"{auto.id} has not said what it chose")
    return Scan(scheme, mbit, target, seconds, chosen, seconds_per_step(auto, results[auto.id]))


def table(scans: Sequence[Scan]) -> str:
    """Markdown."""
    periods = sorted({period for scan in scans for period in scan.seconds})
    lines = [
        "| scheme | Mbit/s |" + "".join(f" {period} |" for period in periods) + " best | auto | ms | against best |",
        "|---|--:|" + "--:|" * (len(periods) + 4),
    ]
    for scan in scans:
        times = "".join(f" {1e3 * scan.seconds[period]:.1f} |" for period in periods)
        lines.append(
            f"| {scan.scheme} | {scan.mbit:g} |{times} {scan.best} | {scan.chosen} | {1e3 * scan.chosen_seconds:.1f} |"
            f" {scan.ratio:.2f} |"
        )
    return "\n".join(lines) + "\n"
