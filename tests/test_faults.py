"""Some of what `python -m tools.faults` runs, and that it would notice what it looks for."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import product

import faults
import pytest


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(400)
@pytest.mark.long("launches of which a rank is lost, and what it leaves is looked for")
@pytest.mark.parametrize("runs", [2, pytest.param(24, marks=pytest.mark.nightly)])
def test_random_faults_end_in_time_with_the_rank_named(capsys, tmp_path, runs):
    cases = [*faults.drawn(runs, seed=1)]
    done = faults.report(cases, jobs=2, seconds=float("inf"), keep=tmp_path)
    said = "\n".join(path.read_text() for path in tmp_path.glob("*.txt"))
    assert done.counts - Counter(waits=len(cases)) == Counter(runs=len(cases)), capsys.readouterr().out + said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_torchrun_ends_when_the_only_rank_of_its_first_node_calls_sys_exit(tmp_path):
    case = faults.Case("sys.exit(0)", "training_step", 3, "periodic", "torchrun", 1, 0, replicas=False, workers=False)
    outcome = faults.run(case, tmp_path)
    assert outcome.is_good, outcome
    assert not outcome.launcher_waits


def test_the_list_has_all_faults_moments_schemes_and_launchers():
    cases = [*faults.listed()]
    assert {(case.fault, case.moment) for case in cases} == {(f, m) for f in faults.FAULTS for m in faults.MOMENTS}
    assert {(case.scheme, case.launcher) for case in cases} == {*product(faults.SCHEMES, faults.LAUNCHERS)}
    assert {(case.launcher, case.ranks) for case in cases} >= {*product(("fork", "popen", "torchrun", "slurm"), (1, 2))}
    assert all(case.victim < 2 * case.ranks for case in cases)


def test_leftover_processes_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "_GRACE", 1.0)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleeper, cwd=tmp_path, start_new_session=True) as process:
        began = time.monotonic()
        assert faults.processes_left([], tmp_path) == [f"process {process.pid}"]
        assert time.monotonic() - began < 10
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "half.ckpt").write_bytes(b"PK")
    (left,) = faults.files_left(tmp_path)
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
    assert faults.is_named_in(replace(case, fault="killed", victim=victim), said) is is_named
