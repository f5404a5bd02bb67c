"""What a rank knows of its own process and of its neighbours', and what ends them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_hiercomm.control import process
from lightning_hiercomm.control.plane import ControlPlane
from lightning_hiercomm.control.reports import Failure


@pytest.fixture
def stopped() -> Iterator[tuple[int, list[str]]]:
    """A stopped child and its identity, as it gives it itself."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, "\n".join(process.identity()).encode())
        while True:  # continued, it stops again
            os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    said = os.read(reader, 4096).decode().split("\n")
    yield child, said
    for end in (reader, writer):
        os.close(end)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_stopped_process_is_ended_by_who_knows_it(stopped):
    child, identity = stopped
    process.end_frozen(identity, patience=0.1)
    deadline = time.monotonic() + 5
    while state_of(child) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("started", ["1", ""], ids=["later one", "unknown"])
def test_no_other_process_is(stopped, started):
    child, identity = stopped
    identity[2] = started
    process.end_frozen(identity)
    time.sleep(0.05)
    assert state_of(child) == "T"


def test_stacks_are_written_where_no_file_can_be_made(monkeypatch, capfd):
    """A full disk must not look like a lost connection to the thread that writes them."""

    def full() -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(process.tempfile, "TemporaryFile", full)
    process.dump_stacks("what rank 0 does:")
    said = capfd.readouterr().err
    assert said.startswith("lightning_hiercomm: what rank 0 does:")
    assert "test_stacks_are_written_where_no_file_can_be_made" in said


def test_a_stuck_worker_is_distinguished_from_a_waiting_one(stopped, monkeypatch):
    child, _ = stopped
    reader, writer = os.pipe()
    waiting = os.fork()
    if waiting == 0:
        os.read(reader, 1)
        os._exit(0)
    children = [type("Child", (), {"pid": pid, "daemon": True}) for pid in (child, waiting)]
    monkeypatch.setattr(process.multiprocessing, "active_children", lambda: children)
    stuck = process.StuckDetector()
    stuck.check()
    time.sleep(0.1)
    what, seconds = stuck.check()
    assert what == f"its worker {child}"
    assert 0.1 <= seconds < 5
    os.write(writer, b".")
    os.waitpid(waiting, 0)
    for end in (reader, writer):
        os.close(end)


def test_a_rank_that_ends_at_once_still_ends_the_frozen_one(stopped):
    _, who = stopped

    def learn_and_end():
        plane = ControlPlane(0, 2, "rank 0 (node 0)", grace=1.0)
        plane.processes = {1: who}
        watch = threading.Thread(target=plane.learn, args=(Failure("rank 1 is frozen", silent=[1]),), daemon=True)
        watch.start()
        watch.join()

    rank = multiprocessing.get_context("fork").Process(target=learn_and_end)
    rank.start()
    rank.join(timeout=10.0)
    assert process.is_gone(who)
