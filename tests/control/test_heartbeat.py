"""Whether a thread waits for other ranks, and where; the table of ranks that wait for each other; and processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb

import pytest

from lightning_hiercomm.control import heartbeat
from lightning_hiercomm.control.heartbeat import ALIKE, Status, standstill, where_main_thread_waits, where_waits

# ---- where the main thread is ----------------------------------------------------------------------------------------

INSTALLED = "/x/site-packages"
PACKAGE = str(Path(heartbeat.__file__).parents[1])


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
POLL = function("barrier", f"{PACKAGE}/control/plane.py")
OWN_CHECK = function("check", f"{PACKAGE}/run/misuse.py")
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
    assert call == "where_main_thread_waits"
    assert re.fullmatch(r"test_heartbeat\.py:\d+ \(test_the_line_.*\)", line)


@pytest.mark.parametrize(
    ("functions", "is_one"),
    [((HOOK, BARRIER), True), ((HOOK, STEP, POLL), True), ((HOOK, STEP, EXCHANGE), True), ((HOOK, OWN_CHECK), False)],
)
def test_an_error_of_a_collective_is_recognized(functions, is_one):
    with pytest.raises(ZeroDivisionError) as caught:
        functions[0](*functions[1:], divmod, 1, 0)
    frames = [frame for frame, _ in walk_tb(caught.value.__traceback__)]
    call, _ = where_waits(frames[-1:])
    assert (call != "" and "hiercomm" not in call) == is_one


# ---- the table -------------------------------------------------------------------------------------------------------


def status(rank: int, call: str = "backward", **others: object) -> Status:
    same = {"batches": 4, "collectives": 3, "idle": 60.0, "doing": "training batch 4", "line": "train.py:9 (main)"}
    same |= {"process": "", "beats": 9, "has_left": False, **others}
    return Status(rank=rank, place=f"rank {rank}", call=call, **same)


def test_ranks_that_wait_in_different_places_are_a_deadlock_with_a_table():
    other = status(1, "all_gather", doing="saving a checkpoint", line="")
    assert standstill([status(0), other], [], 60.0)[0].splitlines() == [
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
    said, must_end = standstill([status(0), status(1, **other)], [], 60.0)
    assert must_end
    assert "the ranks wait for each other" in said


def test_a_rank_that_sends_nothing_is_named():
    said, must_end = standstill([status(0), status(1, ""), status(2)], [1], 60.0)
    assert must_end
    assert said.splitlines()[0].endswith(": rank 1 is frozen: it sent nothing")
    assert "\nrank 1 | is frozen | training batch 4 |" in said
    assert ALIKE not in said


@pytest.mark.parametrize("other", ["backward", ""], ids=["in one place", "one computes"])
def test_ranks_that_are_slow_go_on_with_a_table(other):
    said, must_end = standstill([status(0), status(1, other)], [], 60.0)
    assert not must_end
    assert said.splitlines()[0] == "no rank made progress for 60 s (hang_timeout): the run goes on"
    assert said.splitlines()[3].startswith(f"rank 1 | {other or 'is busy'}")


@pytest.mark.parametrize(
    "statuses",
    [[status(0, ""), status(1, "")], [status(0), status(1, "barrier", idle=59.0)], [status(0, has_left=True)]],
    ids=["all compute", "one has not waited for long", "all have left"],
)
def test_other_ranks_are_in_no_table(statuses):
    assert standstill(statuses, [], 60.0) == ("", False)


# ---- processes -------------------------------------------------------------------------------------------------------

STOPS = """
import os, signal
from lightning_hiercomm.control import heartbeat
print(heartbeat.identity(), flush=True)
while True:  # continued, it stops again
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def stopped():
    """A stopped child, and its identity, as it gives it itself."""
    child = subprocess.Popen([sys.executable, "-c", STOPS], stdout=subprocess.PIPE, text=True)
    said = child.stdout.readline().removesuffix("\n")
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    yield child, said
    child.kill()
    child.communicate()


def test_a_stopped_process_is_ended_by_who_knows_it(stopped):
    child, identity = stopped
    heartbeat.end_frozen(identity)
    assert child.wait(timeout=5) == -signal.SIGKILL


@pytest.mark.parametrize(
    "another",
    [lambda who: f"other {who}", lambda who: f"{who}0", lambda who: "", lambda who: heartbeat.identity()],
    ids=["machine", "later", "unknown", "own"],
)
def test_no_other_process_is_ended(stopped, another):
    child, identity = stopped
    heartbeat.end_frozen(another(identity))
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.1)


def test_a_process_has_ended_when_its_parent_has_not_waited_for_it_yet(stopped):
    child, identity = stopped
    assert not heartbeat.has_ended(identity)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert heartbeat.has_ended(identity)
    assert not heartbeat.has_ended(f"other {identity}")
    assert not heartbeat.has_ended("")
