"""Pooled ranks run each program as if it were their first."""

from __future__ import annotations

import ast
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import stand_in_for_python
from ranks import RankError, Ranks


@pytest.fixture(scope="module")
def ranks():
    kept = Ranks()
    yield kept
    kept.close()


def test_pooled_ranks_stay_and_run_local_functions(ranks):
    value = "own"
    first, second = (ranks.run(2, lambda: (os.environ["LOCAL_RANK"], value, os.getpid())) for _ in range(2))
    assert first == second
    assert [own[:2] for own in first] == [("0", value), ("1", value)]


def test_pooled_ranks_end_with_their_program():
    program = "import os; from ranks import Ranks; print(Ranks().run(1, os.getpid))"
    python = [stand_in_for_python(), "-c", program]
    said = subprocess.run(python, cwd=Path(__file__).parent, timeout=60, capture_output=True)
    assert said.returncode == 0
    (rank,) = ast.literal_eval(said.stdout.decode())
    assert not Path(f"/proc/{rank}").exists()


def _thread():
    threading.Thread(target=threading.Event().wait, name="hiercomm-left", daemon=True).start()


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: os.chdir("/"),
        _thread,
    ],
    ids=["dtype", "deterministic", "folder", "thread"],
)
def test_changed_ranks_are_replaced(ranks, change):
    before = ranks.run(1, os.getpid)
    ranks.run(1, change)
    assert ranks.run(1, os.getpid) != before


def test_process_groups_of_a_program_are_closed(ranks):
    def begins():
        dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)

    def leaves():
        circle = [dist.new_group([0, 1])]
        circle.append(circle)

    def threads():
        names = [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]
        return sum("gloo" in name for name in names)

    ranks.run(2, begins)
    before = ranks.run(2, threads)
    ranks.run(2, leaves)
    assert ranks.run(2, threads) == before


def test_variables_and_random_numbers_are_restored(ranks):
    def draws():
        os.environ["FIRST"] = "1"
        return os.environ.get("SECOND"), torch.rand(1).item(), os.getpid()

    def draws_too():
        os.environ["SECOND"] = "1"
        return os.environ.get("FIRST"), torch.rand(1).item(), os.getpid()

    assert ranks.run(1, draws) == ranks.run(1, draws_too) == ranks.run(1, draws)


def test_failed_ranks_are_reported_and_replaced(ranks):
    def fails():
        raise ValueError("the dog")

    before = ranks.run(1, os.getpid)
    with pytest.raises(RankError, match="rank 0: ValueError: the dog"):
        ranks.run(1, fails)
    assert ranks.run(1, os.getpid) != before
