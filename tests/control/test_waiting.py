"""Whether the main thread of a process waits for other ranks, and where."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lightning_hiercomm.control import waiting
from lightning_hiercomm.control.waiting import MainThread, Position

INSTALLED = "/x/site-packages"
C10D = f"{INSTALLED}/torch/distributed/distributed_c10d.py"
BACKWARD = f"{INSTALLED}/torch/autograd/graph.py"
PACKAGE = str(Path(waiting.__file__).parents[1])


def function(name: str, file: str) -> Callable[..., object]:
    """A function that calls its argument, and looks as if it were defined in that file."""
    names: dict[str, Callable[..., object]] = {}
    exec(compile(f"def {name}(call, *more):\n    return call(*more)", file, "exec"), names)
    return names[name]


barrier = function("barrier", C10D)
gather = function("all_gather", C10D)
backward = function("_engine_run_backward", BACKWARD)
step = function("optimizer_step", f"{PACKAGE}/trainer/hooks.py")
exchange = function("wait", f"{PACKAGE}/comm/torch.py")
save = function("save_checkpoint", f"{INSTALLED}/lightning/pytorch/trainer/trainer.py")
hook = function("on_train_batch_end", "/home/me/train.py")
other_hook = function("on_train_epoch_end", "/home/me/train.py")


def is_in(called: Callable[..., object]) -> bool:
    """Whether the main thread is in that function."""
    frame = sys._current_frames()[threading.main_thread().ident]
    return any(each.f_code is called.__code__ for each in waiting._frames(frame))


@pytest.fixture
def wait_in() -> Callable[..., Position]:
    """``wait_in(*functions)``: what another thread sees while the main thread is in those, the innermost last."""

    def seen(*functions: Callable[..., object], seconds: float = 0.1) -> Position:
        found: list[Position] = []
        is_over = threading.Event()

        def look() -> None:
            while not is_in(functions[-1]):
                time.sleep(0.01)
            main_thread = MainThread()
            main_thread.position()
            time.sleep(seconds)
            found.append(main_thread.position())
            is_over.set()

        looking = threading.Thread(target=look)
        called = [*functions, is_over.wait]
        looking.start()
        called[0](*called[1:])
        looking.join()
        return found[0]

    return seen


def test_a_collective_of_torch_is_a_wait_with_the_users_line(wait_in):
    wait = wait_in(hook, barrier)
    assert wait.seconds >= 0.1
    assert (wait.call, wait.line) == ("torch.distributed.barrier", "train.py:2 (on_train_batch_end)")


def test_an_exchange_of_this_package_is_a_wait_named_by_its_hook(wait_in):
    assert wait_in(hook, step, exchange).call == "optimizer_step (lightning_hiercomm)"
    assert wait_in(hook, save, barrier).call == "trainer.save_checkpoint"


def test_a_backward_pass_that_computes_nothing_is_a_wait(wait_in):
    assert wait_in(hook, backward).call == "backward"


def test_a_broadcast_of_buffers_in_cpp_is_a_wait(wait_in):
    broadcast = function("_sync_buffers", f"{INSTALLED}/torch/nn/parallel/distributed.py")
    assert wait_in(hook, broadcast).call == "torch.distributed._sync_buffers"


@pytest.mark.parametrize("work", [torch._C.Future([]), torch.futures.Future()])
def test_waiting_for_the_work_of_a_collective_is_a_wait(work):
    names = {}
    exec(compile("def on_train_batch_end(work):\n    return work.wait()", "/home/me/train.py", "exec"), names)
    found = []

    def look() -> None:
        while not is_in(names["on_train_batch_end"]):
            time.sleep(0.01)
        time.sleep(0.05)
        found.append(MainThread().position())
        work.set_result(None)

    looking = threading.Thread(target=look)
    looking.start()
    names["on_train_batch_end"](work)
    looking.join()
    assert (found[0].call, found[0].line) == ("torch.distributed.Work.wait", "train.py:2 (on_train_batch_end)")


def test_writing_a_checkpoint_is_no_wait(wait_in):
    assert wait_in(hook, save, function("write", f"{PACKAGE}/checkpoints/durable.py")).call == ""


def test_a_backward_pass_that_computes_is_no_wait(wait_in, monkeypatch):
    clock = iter([0.0, 0.0, 0.9, 0.9])  # processor seconds when it begins, and 0.5 s later
    monkeypatch.setattr(waiting.time, "process_time", lambda: next(clock))
    assert wait_in(hook, backward, seconds=0.5).call == ""


@pytest.mark.parametrize(("is_busy", "call"), [(True, "backward"), (False, "")])
def test_a_thread_that_uses_the_processor_waits_if_its_gpu_is_busy(is_busy, call, monkeypatch):
    seconds, found = iter([0.0, 10.0]), []
    monkeypatch.setattr(waiting.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(waiting.time, "process_time", iter([0.0, 0.0, 9.9]).__next__)
    main_thread = MainThread(gpu_is_busy=lambda: is_busy)
    is_over = threading.Event()

    def look() -> None:
        while not is_in(backward):
            time.sleep(0.01)
        found.extend(main_thread.position() for _ in range(2))
        is_over.set()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(look)
        hook(backward, is_over.wait)
    assert found[1].call == call


@pytest.mark.parametrize("functions", [(hook,), (save,), (backward, hook), (barrier, hook)])
def test_other_calls_that_last_long_are_no_waits(wait_in, functions):
    assert wait_in(*functions).call == ""


def test_ranks_with_different_parts_in_one_exchange_wait_in_the_same_place(wait_in):
    leader = wait_in(hook, step, exchange, gather)
    assert leader.digest == wait_in(hook, step, exchange).digest
    assert leader.digest != wait_in(other_hook, step, exchange).digest


def test_two_collectives_of_one_function_are_different_places(wait_in):
    assert wait_in(hook, barrier).digest != wait_in(hook, gather).digest
    assert wait_in(hook, barrier).digest == wait_in(hook, barrier).digest


def test_a_thread_that_begins_more_collectives_has_not_waited_since():
    counts = iter([1, 1, 2])
    main_thread = MainThread(lambda: next(counts))
    seconds: list[float] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_in(barrier):
            time.sleep(0.01)
        for _ in range(3):
            time.sleep(0.1)
            seconds.append(main_thread.position().seconds)
        is_over.set()

    looking = threading.Thread(target=look)
    looking.start()
    barrier(is_over.wait)
    looking.join()
    assert seconds[0] == seconds[2] == 0.0
    assert seconds[1] >= 0.1


def test_the_line_that_the_main_thread_runs_is_reported():
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(MainThread().position).result().line
    assert re.fullmatch(r"test_waiting\.py:\d+ \(test_the_line_.*\)", line)
