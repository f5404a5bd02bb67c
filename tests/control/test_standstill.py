"""Whether a thread waits for other ranks, and where; and the table of ranks that wait for each other."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb

import pytest

from lightning_hiercomm.control import standstill as own
from lightning_hiercomm.control.standstill import ALIKE, Status, standstill, where_main_thread_waits, where_waits

# ---- where the main thread is ----------------------------------------------------------------------------------------

INSTALLED = "/x/site-packages"
PACKAGE = str(Path(own.__file__).parents[1])


def function(name: str, file: str) -> Callable[..., object]:
    """A function that calls its argument, and looks as if it were defined in that file."""
    names: dict[str, Callable[..., object]] = {}
    exec(compile(f"def {name}(call, *more):\n    return call(*more)", file, "exec"), names)
    return names[name]


HOOK = function("on_train_batch_end", "/home/me/train.py")
BARRIER = function("barrier", f"{INSTALLED}/torch/distributed/distributed_c10d.py")
LOGGED = function("wrapper", f"{INSTALLED}/torch/distributed/c10d_logger.py")
BACKWARD = function("_engine_run_backward", f"{INSTALLED}/torch/autograd/graph.py")
AUTOGRAD = function("backward", f"{INSTALLED}/torch/autograd/__init__.py")
BUFFERS = function("_sync_buffers", f"{INSTALLED}/torch/nn/parallel/distributed.py")
STEP = function("optimizer_step", f"{PACKAGE}/trainer/hooks.py")
EXCHANGE = function("wait", f"{PACKAGE}/comm/torch.py")
WRITE = function("write", f"{PACKAGE}/checkpoints/durable.py")
SAVE = function("save_checkpoint", f"{INSTALLED}/lightning/pytorch/trainer/trainer.py")
SAVE_SHARDS = function("save", f"{INSTALLED}/torch/distributed/checkpoint/state_dict_saver.py")


@pytest.mark.parametrize(
    ("functions", "call"),
    [
        ((HOOK, BARRIER), "barrier"),
        ((HOOK, LOGGED, BARRIER), "barrier"),
        ((HOOK, STEP, EXCHANGE), "optimizer_step (lightning_hiercomm)"),
        ((HOOK, STEP, EXCHANGE, BARRIER), "optimizer_step (lightning_hiercomm)"),  # another part of one exchange
        ((HOOK, AUTOGRAD, BACKWARD), "backward"),
        ((HOOK, BUFFERS), "_sync_buffers"),
        ((HOOK, SAVE, WRITE), ""),  # a checkpoint is written
        ((HOOK, SAVE_SHARDS), ""),
        ((HOOK,), ""),
        ((BARRIER, HOOK), ""),
    ],
)
def test_a_thread_waits_if_its_innermost_function_calls_collectives(functions, call):
    found: list[tuple[str, str]] = []
    is_over = threading.Event()

    def look() -> None:
        time.sleep(0.05)
        found.append(where_main_thread_waits())
        is_over.set()

    threading.Thread(target=look).start()
    functions[0](*functions[1:], is_over.wait)
    assert found == [(call, "train.py:2 (on_train_batch_end)")]


def test_the_line_that_the_main_thread_runs_is_reported():
    call, line = where_main_thread_waits()
    assert call == "where_main_thread_waits (lightning_hiercomm)"
    assert re.fullmatch(r"test_standstill\.py:\d+ \(test_the_line_.*\)", line)


@pytest.mark.parametrize(("functions", "is_one"), [((HOOK, BARRIER), True), ((HOOK,), False)])
def test_an_error_of_a_collective_is_recognized(functions, is_one):
    with pytest.raises(ZeroDivisionError) as caught:
        functions[0](*functions[1:], divmod, 1, 0)
    frames = [frame for frame, _ in walk_tb(caught.value.__traceback__)]
    assert (where_waits(frames[-1:])[0] != "") == is_one


# ---- the table -------------------------------------------------------------------------------------------------------


def status(rank: int, call: str = "backward", **others: object) -> Status:
    same = {"batches": 4, "collectives": 3, "idle": 60.0, "doing": "training batch 4", "line": "train.py:9 (main)"}
    same |= {"process": "", "beats": 9, "has_left": False, **others}
    return Status(rank=rank, place=f"rank {rank}", call=call, **same)


def test_ranks_that_wait_in_different_places_are_a_deadlock_with_a_table():
    other = status(1, "all_gather", doing="saving a checkpoint", line="")
    assert standstill([status(0), other], [], 60.0).splitlines() == [
        "no rank made progress for 60 s (hang_timeout): the ranks wait for each other",
        "rank   | waits in   | during              | line of the program",
        "rank 0 | backward   | training batch 4    | train.py:9 (main)",
        "rank 1 | all_gather | saving a checkpoint |",
        ALIKE,
    ]


@pytest.mark.parametrize(
    "other", [{"batches": 5}, {"collectives": 4}, {"line": "train.py:10 (main)"}, {"has_left": True}], ids=str
)
def test_ranks_in_the_same_function_are_apart_after_unequal_work(other):
    assert "the ranks wait for each other" in standstill([status(0), status(1, **other)], [], 60.0)


def test_a_rank_that_sends_nothing_is_named():
    said = standstill([status(0), status(1, ""), status(2)], [1], 60.0)
    assert said.splitlines()[0].endswith(": rank 1 is frozen: it sent nothing")
    assert "\nrank 1 | is frozen | training batch 4 |" in said
    assert ALIKE not in said


@pytest.mark.parametrize(
    "statuses",
    [
        [status(0), status(1)],
        [status(0), status(1, "")],
        [status(0), status(1, "barrier", idle=59.0)],
        [status(0, has_left=True)],
    ],
    ids=["in one place", "one computes", "one has not waited for long", "all have left"],
)
def test_other_long_waits_are_no_deadlock(statuses):
    assert standstill(statuses, [], 60.0) == ""
