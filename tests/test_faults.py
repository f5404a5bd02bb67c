"""Some of what `python -m tests.faults` runs, and that it would notice what it looks for."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import faults
import pytest


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(400)
def test_random_faults_end_every_run_in_time_with_the_rank_named_and_nothing_left(capsys, tmp_path):
    cases = [*faults.drawn(12, seed=1)]
    counts = faults.report(cases, jobs=2, seconds=float("inf"), keep=tmp_path)
    said = "\n".join(path.read_text() for path in tmp_path.glob("*.txt"))
    assert counts == Counter(runs=len(cases)), capsys.readouterr().out + said


def test_the_list_has_every_fault_at_every_moment_and_all_schemes_and_launchers():
    cases = [*faults.listed()]
    assert {(case.fault, case.moment) for case in cases} == {(f, m) for f in faults.FAULTS for m in faults.MOMENTS}
    assert {case.scheme for case in cases} == {*faults.SCHEMES}
    assert {case.launcher for case in cases} == {*faults.LAUNCHERS}
    assert all(case.victim < 2 * case.ranks for case in cases)


def test_random_faults_are_the_same_for_a_seed():
    assert [*faults.drawn(20, seed=3)] == [*faults.drawn(20, seed=3)] != [*faults.drawn(20, seed=4)]


def test_what_is_left_behind_is_seen(tmp_path):
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleeper, cwd=tmp_path, start_new_session=True) as process:
        began = time.monotonic()
        assert faults._processes_left([], tmp_path) == [f"process {process.pid}"]
        assert time.monotonic() - began < 10
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "half.ckpt").write_bytes(b"PK")
    (left,) = faults._files_left(tmp_path)
    assert left.startswith("half.ckpt: ")


@pytest.mark.parametrize(
    ("victim", "said", "is_named"),
    [
        (1, "lightning_hiercomm: rank 1 (node 0) died", True),
        (1, "lightning_hiercomm: rank 11 (node 0) died", False),
        (2, "rank 1 (node 0) failed: ValueError: rank 2", False),
        (0, "-- Process 0 terminated with the following error", True),
        (0, "Connection closed by peer", False),
    ],
)
def test_only_the_rank_itself_counts_as_named(victim, said, is_named):
    (case,) = faults.drawn(1, seed=0)
    assert faults._is_named(replace(case, fault="killed", victim=victim), said) is is_named
