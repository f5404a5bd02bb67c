"""What many fits, and many steps, in one process leave behind: nothing.

``SOAK_STEPS=20000`` in the environment makes the runs of many steps long ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments.lightning import find_free_network_port

JOB = Path(__file__).parent / "jobs" / "soak.py"
STEPS = int(os.environ.get("SOAK_STEPS", "400"))
SECONDS = 240 + STEPS / 10

pytestmark = pytest.mark.slow


def soak(folder: Path, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """What each rank saw."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    port = str(find_free_network_port())
    subprocess.run(
        [*torchrun, "--master-port", port, str(JOB), "--out", str(folder), *arguments],
        check=True,
        timeout=SECONDS,
        capture_output=True,
    )
    return [json.loads((folder / f"soak-{rank}.json").read_text()) for rank in range(ranks)]


def test_fifty_fits_leave_no_handle_thread_or_process_group_behind(tmp_path):
    for said in soak(tmp_path, 2, "--fits", "50"):
        seen = said["fits"]
        after_every_scheme, at_the_end = seen[11], seen[-1]
        assert len(seen) == 50
        for name in ("handles", "threads", "process groups"):
            assert at_the_end[name] <= after_every_scheme[name]


@pytest.mark.timeout(SECONDS + 60)
def test_steps_of_asynchronous_schemes_add_no_memory_handle_or_thread(tmp_path):
    for rank, said in enumerate(soak(tmp_path, 4, "--steps", str(STEPS))):
        for scheme, seen in said["steps"].items():
            middle, end = seen[len(seen) // 2], seen[-1]
            grown = end["memory"] - middle["memory"]
            print(f"rank {rank}, {scheme}: {grown} KiB in the last {STEPS // 2} steps, {end}")
            assert len(seen) == 20
            for name in ("handles", "threads", "process groups"):  # a handle may be open for a moment
                assert min(look[name] for look in seen[-5:]) <= max(look[name] for look in seen[5:10]), (scheme, name)
            assert grown < 2048, (scheme, [look["memory"] for look in seen])
