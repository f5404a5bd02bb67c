"""Digits with DASO, run the way its configuration says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"


def accuracy(tmp_path, config):
    """Test accuracy in per cent of a run with a configuration laid over the base."""
    command = [sys.executable, DIGITS / "main.py", "fit", "--config", DIGITS / "config.yaml", "--config", config]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    return float(re.search(r"Test accuracy of the agreed model: ([\d.]+)%", run.stdout)[1])


@pytest.mark.slow
def test_daso_trains_digits_as_well_as_all_reduce_within_one_point(tmp_path):
    daso = accuracy(tmp_path, DIGITS / "daso.yaml")
    assert daso >= 97
    assert daso >= accuracy(tmp_path, DIGITS / "all_reduce.yaml") - 1
