"""What fifty fits in one process leave behind: nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments.lightning import find_free_network_port

JOB = Path(__file__).parent / "jobs" / "soak.py"


@pytest.mark.slow
def test_fifty_fits_leave_no_handle_thread_or_process_group_behind(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port = str(find_free_network_port())
    subprocess.run(
        [*torchrun, "--master-port", port, str(JOB), "--out", str(tmp_path), "--fits", "50"],
        check=True,
        timeout=240,
        capture_output=True,
    )
    for rank in range(2):
        seen = json.loads((tmp_path / f"soak-{rank}.json").read_text())
        after_every_scheme, at_the_end = seen[11], seen[-1]
        assert len(seen) == 50
        assert all(at_the_end[name] <= after_every_scheme[name] for name in after_every_scheme)
