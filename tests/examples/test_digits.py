"""The digits, run the way their configurations say; the main job, the way `make demo` does."""

import re

import pytest


@pytest.mark.long("two epochs of the main job on four ranks, with all that it writes and prints")
def test_short_run_trains_tests_and_reports(folder):
    out = folder.fit_digits("--trainer.max_epochs=2")
    assert folder.accuracy(out) > 50
    assert "Communication of 32 optimizer steps on 4 ranks" in out
    assert "synchronizations between nodes: 8" in out
    last = [line for line in out.splitlines() if not line.startswith("[W")][-3:]  # torch warns without a name server
    assert "times what was sent" in last[0]
    assert "cross entropy" in last[1]
    assert "in bytes" in last[2]
    assert list(folder.path.glob("runs/digits/version_0/events.*"))
    assert list(folder.path.glob("runs/digits/version_0/checkpoints/*.ckpt"))


@pytest.mark.nightly
@pytest.mark.slow
def test_the_main_job_runs_the_commands_of_the_readme(folder, all_reduce_accuracy):
    periodic = folder.fit_digits()
    assert folder.accuracy(periodic) >= 97
    assert folder.accuracy(periodic) >= all_reduce_accuracy - 1
    assert float(re.search(r"([\d.]+) times what was sent", periodic)[1]) >= 5


@pytest.mark.nightly
@pytest.mark.slow
def test_daso_trains_digits_as_well_as_all_reduce_within_one_point(folder, all_reduce_accuracy):
    daso = folder.accuracy(folder.fit_digits("--config", folder.digits / "daso.yaml"))
    assert daso >= 97
    assert daso >= all_reduce_accuracy - 1
