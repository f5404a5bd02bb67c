"""Some of what `python -m tools.faults` runs, and that it would notice what it looks for."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import faults
import pytest


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.nightly  # a push loses a rank under every launcher in test_lost_ranks.py
@pytest.mark.timeout(400)
@pytest.mark.long("launches that lose a rank, and a search for what it leaves")
def test_random_faults_end_in_time_with_the_rank_named(capsys, tmp_path):
    failed = faults.failures([*islice(faults.drawn(seed=1), 24)], keep=tmp_path)
    said = "\n".join(path.read_text() for path in tmp_path.glob("*.txt"))
    assert failed == 0, capsys.readouterr().out + said


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_torchrun_ends_when_the_only_rank_of_its_first_node_calls_sys_exit(tmp_path):
    case = faults.Case("sys.exit(0)", "training_step", 3, "periodic", "torchrun", 1, 0, replicas=False, workers=False)
    outcome = faults.run(case, tmp_path)
    assert outcome.is_good, outcome
    assert not outcome.launcher_waits


SURVIVED = """
import os, pathlib, time
if os.fork():
    pathlib.Path("accident").write_text(str(time.time()))
    os._exit(1)
time.sleep(0.5)
print("rank 0 died")
"""


def test_ranks_that_outlive_their_parent_may_name_it(tmp_path, monkeypatch):
    # under popen they are children of rank 0, and the only ones that can speak if it is killed
    def start(case, folder):
        with (folder / "output-0").open("w") as output:
            yield subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", SURVIVED], stdout=output, cwd=folder, start_new_session=True
            )

    monkeypatch.setattr(faults, "_start", start)
    case = faults.Case("segfault", "validation_step", 2, "periodic", "popen", 2, 0, replicas=False, workers=False)
    outcome = faults.run(case, tmp_path)
    assert outcome.is_good, outcome
    assert outcome.seconds >= 0.5


@pytest.mark.parametrize(
    ("said", "is_named"),
    [
        ("lightning_hiercomm: rank 1 (node 0) died", True),
        ("process 1 terminated with signal SIGKILL", True),
        ("[rank: 1] Child process with PID 7 terminated with code -9. Forcefully terminating all others", True),
        ("[rank: 1] Received SIGTERM: rank 0 died", False),
        ("rank 1 (node 0) ends because rank 0 (node 0) died", False),
        ("rank 0 died. Ending rank 1 (node 0), which is waiting for it.", False),
        ("rank 11 (node 5) died", False),
        (
            "rank 0, or torchrun's agent there, died, and torch's store with it. See there which rank failed first",
            False,
        ),
        (
            "rank 0, or torchrun's agent there, died, and torch's store with it. See there which rank failed first\n"
            "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -11",
            True,
        ),
    ],
)
def test_a_rank_counts_as_named_only_if_it_is_the_one_that_failed(said, is_named):
    case = faults.Case("kill", "training_step", 3, "periodic", "popen", 2, 1, replicas=False, workers=False)
    assert faults.is_named_in(case, said) == is_named
