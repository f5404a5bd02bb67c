"""The main job, run the way the README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"


def fit(tmp_path, *args):
    """Runs the program; returns what it printed."""
    command = [sys.executable, DIGITS / "main.py", "fit", "--config", DIGITS / "config.yaml", *args]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def accuracy(out):
    return float(re.search(r"Test accuracy of the agreed model: ([\d.]+)%", out)[1])


def test_short_run_trains_tests_and_reports(tmp_path):
    out = fit(tmp_path, "--trainer.max_epochs=2", "--trainer.strategy.init_args.scheme.init_args.sync_every=4")
    assert accuracy(out) > 50
    assert "Communication of 32 optimizer steps on 4 ranks" in out
    assert "agreements between nodes: 8" in out
    assert list(tmp_path.glob("runs/digits/version_0/events.*"))
    assert list(tmp_path.glob("runs/digits/version_0/checkpoints/*.ckpt"))


@pytest.mark.slow
def test_main_job_holds_what_the_readme_promises(tmp_path):
    periodic = fit(tmp_path)
    all_reduce = fit(tmp_path, "--config", DIGITS / "all_reduce.yaml")
    assert accuracy(periodic) >= 97
    assert accuracy(periodic) >= accuracy(all_reduce) - 1
    assert float(re.search(r"([\d.]+) times what was sent", periodic)[1]) >= 10
