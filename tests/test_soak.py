"""What many fits, and many steps, in one process leave behind: nothing.

``SOAK_STEPS=20000`` in the environment makes the runs of many steps long ones.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedPython, forking_workers
from ports import free_port

JOB = Path(__file__).parent / "jobs" / "soak.py"
STEPS = int(os.environ.get("SOAK_STEPS", "120"))
SECONDS = 240 + STEPS / 10

pytestmark = pytest.mark.slow


def soak(folder: Path, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    port = str(free_port())
    torchrun = "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", port, *forking_workers()
    job = (JOB, "--out", folder, *arguments)
    run = ForkedPython([*torchrun, *job], {**os.environ, "OMP_NUM_THREADS": "1"}, folder / "printed")
    try:
        output, _ = run.communicate(timeout=SECONDS)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, output
    return [json.loads((folder / f"soak-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.long("at least 17 fits, one after the other, in one process")
def test_many_fits_leak_no_handle_thread_or_process_group(tmp_path):
    for said in soak(tmp_path, 2, "--fits", "17"):
        seen = said["fits"]
        after_every_scheme = seen[11]
        assert len(seen) == 17
        for name in ("handles", "threads", "process groups"):  # a thread may need a moment to end
            assert min(look[name] for look in seen[-5:]) <= after_every_scheme[name], name


@pytest.mark.nightly
@pytest.mark.long("120 steps of each of four schemes on four ranks")
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
