"""``sync_every="auto"`` against a scan."""

from __future__ import annotations

import pytest

pytest.importorskip("benchmarks")

from benchmarks.contenders import ROWS
from benchmarks.job import Record
from benchmarks.period import Scan, jobs_of, scan_of, table


def records(job, step, period=None, error=None):
    ends = [1 + step * count for count in range(job.warmup + job.steps)]
    return [Record(job.id, rank, 0, step_ends=ends, period=period, error=error) for rank in range(2)]


def test_best_period_is_the_shortest_near_the_speed_of_the_longest():
    scan = Scan("diloco", 100.0, 0.05, {1: 0.4, 4: 0.2, 16: 0.104, 64: 0.1}, chosen=20, chosen_seconds=0.13)
    assert scan.best == 16
    assert scan.ratio == pytest.approx(1.25)
    assert "| diloco | 100 | 400.0 | 200.0 | 104.0 | 100.0 | 16 | 20 | 130.0 | 1.25 |" in table([scan])


def test_period_scan_times_whole_periods():
    *scan, auto = jobs_of("daso", "mlp1m", [4, 64], 10, 30.0)
    assert [(ROWS[job.row].period, job.steps) for job in scan] == [(4, 12), (64, 64)]
    assert auto.steps == 128
    assert ROWS[auto.row].options["arguments"]["sync_every"] == "auto"


def test_what_was_chosen_comes_from_the_run():
    jobs = jobs_of("periodic", "mlp1m", [1, 64], 10, 30.0)
    results = {job.id: records(job, step, 40) for job, step in zip(jobs, [0.3, 0.1, 0.1], strict=True)}
    scan = scan_of("periodic", jobs, results, 500.0, 0.05)
    assert (scan.chosen, scan.best) == (40, 64)
    assert scan.ratio == pytest.approx(1.0)


def test_a_scan_that_failed_says_so():
    jobs = jobs_of("diloco", "mlp1m", [1, 64], 10, 30.0)
    results = {job.id: records(job, 0.1, error="it hung") for job in jobs}
    with pytest.raises(RuntimeError, match="it hung"):
        scan_of("diloco", jobs, results, 500.0, 0.05)
