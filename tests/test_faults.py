"""Some of what `python -m tools.faults` runs, and that it would notice what it looks for."""

from __future__ import annotations

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
