"""The package's types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long("mypy reads torch's and Lightning's types")
@pytest.mark.skipif(Version(torch.__version__) < Version("2.14"), reason="checked against newer stubs of torch")
@pytest.mark.timeout(600)
def test_mypy_finds_nothing_to_complain_of():
    mypy = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert mypy.returncode == 0, mypy.stdout + mypy.stderr
