"""The control plane, its ranks being threads of this process with a store in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, Store, TCPStore

from lightning_hiercomm.control import plane as control
from lightning_hiercomm.control import process
from lightning_hiercomm.control.keys import Keys
from lightning_hiercomm.control.plane import ControlPlane, RankFailure, seconds_between_beats
from lightning_hiercomm.control.reports import Status
from lightning_hiercomm.control.waiting import MainThread, Position


class Stands(MainThread):
    """A main thread that stays somewhere."""

    def __init__(self, position: Position) -> None:
        self._position = position

    def position(self) -> Position:
        return self._position


COMPUTES = Position(line="train.py:5 (log)")
HERE = process.identity()
Start = Callable[..., list[ControlPlane]]


@pytest.fixture
def start(monkeypatch) -> Iterator[Start]:
    """``start(size, **settings)``: connected ranks, without the ``silent`` ones, which have written a last status."""
    planes: list[ControlPlane] = []

    def connect(
        size: int,
        silent: dict[int, dict] | None = None,
        positions: tuple[Position, ...] = (),
        stores: Callable[[], Store] | None = None,
        hang_timeout: float | None = None,
    ) -> list[ControlPlane]:
        shared = HashStore()
        for rank in range(size):
            if silent and rank in silent:
                last = {"process": [HERE[0], "", ""], "doing": "starting", **silent[rank]}
                Keys(shared, size).write_status(Status(rank=rank, place=f"rank {rank} (node 0)", **last))
                continue
            thread = Stands(positions[rank]) if positions else None
            # `grace` is long: a rank that is not ended by its failure would take the test process with it
            store = stores() if stores else shared
            planes.append(ControlPlane(store, rank, size, f"rank {rank} (node 0)", 60.0, hang_timeout, thread))
        return planes

    yield connect
    for plane in reversed(planes):
        plane.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- failures --------------------------------------------------------------------------------------------------------


def test_a_failure_reaches_every_rank_by_name(start):
    planes = start(3)
    assert planes[1].report_failure(ValueError("boom")) == "rank 1 (node 0) failed: ValueError: boom"
    for plane in (planes[0], planes[2]):
        assert plane.wait_for_failure(5.0) == "rank 1 (node 0) failed: ValueError: boom"
        with pytest.raises(RankFailure, match=r"rank 1 \(node 0\) failed"):
            plane.should_stop()


def test_a_failure_of_many_words_is_cut(start):
    planes = start(2)
    planes[1].report_failure(ValueError("ä" * 100_000))
    failure = planes[0].wait_for_failure(5.0)
    assert failure is not None
    assert failure.startswith("rank 1 (node 0) failed: ValueError: ää")
    assert len(failure) == 2000


def test_an_interruption_is_reported_as_such(start):
    assert start(2)[1].report_failure(KeyboardInterrupt()) == "rank 1 (node 0) was interrupted"


def test_only_the_first_failure_counts(start):
    planes = start(3)
    planes[1].report_failure(ValueError("the first"))
    assert "the first" in planes[0].wait_for_failure(5.0)
    planes[0].report_failure(ValueError("the second"))
    assert "the first" in planes[2].wait_for_failure(5.0)


def test_a_failure_just_before_a_rank_leaves_is_reported(start):
    planes = start(2)
    planes[0].report_failure(ValueError("no"))
    planes[0].close()
    assert planes[1].wait_for_failure(5.0) == "rank 0 (node 0) failed: ValueError: no"


def test_leaving_is_no_failure(start):
    planes = start(3, positions=(COMPUTES,) * 3, hang_timeout=1.0)
    planes[2].close()
    planes[1].close()
    assert planes[0].wait_for_failure(1.5) is None  # it sees neither of them as dead or frozen


@pytest.mark.parametrize("has_left", [False, True])
def test_an_ended_process_of_this_machine_is_a_death_unless_it_left(start, capfd, has_left):
    planes = start(2, silent={1: {"process": [HERE[0], "2147483647", "12"], "has_left": has_left}})
    expected = None if has_left else "rank 1 (node 0) died"
    assert planes[0].wait_for_failure(1.5 if has_left else 5.0) == expected
    # it is printed at once, because a launcher may end everybody else
    assert capfd.readouterr().err == ("" if has_left else f"lightning_hiercomm: {expected}\n")


def test_a_silent_rank_has_died_if_a_collective_broke(start):
    planes = start(3, silent={2: {}}, hang_timeout=10.0)
    time.sleep(1.0)
    assert planes[1].failure is None
    assert planes[0].wait_for_failure(5.0) == "rank 2 (node 0) died"


def test_a_silent_rank_is_frozen_after_hang_timeout_and_ended(start, capfd, monkeypatch):
    ended = []
    monkeypatch.setattr(control.process, "end_frozen", ended.append)
    planes = start(3, silent={2: {}}, positions=(COMPUTES,) * 3, hang_timeout=1.0)
    message = "rank 2 (node 0) is frozen: it sent nothing for 1 s, and before it was starting"
    wait_until(lambda: all(plane.failure == message for plane in planes))
    wait_until(lambda: ended == [[HERE[0], "", ""]] * 2)
    assert capfd.readouterr().err == f"lightning_hiercomm: {message}\n"


def test_a_rank_that_does_not_end_by_itself_is_ended_after_the_grace(start, capfd, monkeypatch):
    ended = []
    monkeypatch.setattr(control.process, "end_this", lambda: ended.append(True))
    planes = start(2)
    planes[0].grace = 0.1
    planes[1].report_failure(ValueError("no"))
    wait_until(lambda: ended == [True])
    assert "rank 1 (node 0) failed: ValueError: no. Ending rank 0 (node 0).\n" in capfd.readouterr().err


def test_a_run_that_was_stopped_as_a_whole_goes_on(start, monkeypatch):
    planes = start(2, hang_timeout=2.0)
    stopped, clock = threading.Event(), time.monotonic
    monkeypatch.setattr(control.time, "monotonic", lambda: clock() + 1000.0 * stopped.is_set())
    stopped.set()
    time.sleep(1.0)
    assert planes[0].failure is planes[1].failure is None


# ---- ranks that make no progress -------------------------------------------------------------------------------------

BACKWARD = Position(seconds=60.0, call="backward", digest="a", line="train.py:9 (main)", collectives=3)
GATHER = Position(seconds=60.0, call="torch.distributed.all_gather", digest="b", collectives=3)


def test_ranks_that_wait_in_different_places_end_the_run_with_a_table(start, capfd):
    planes = start(2, positions=(BACKWARD, GATHER), hang_timeout=1.0)
    wait_until(lambda: planes[1].failure)
    assert "rank 1 (node 0) | torch.distributed.all_gather | starting" in planes[1].failure
    assert capfd.readouterr().err.count(f"lightning_hiercomm: {planes[1].failure}\n") == 1


def test_the_lowest_rank_that_is_there_finds_a_deadlock(start):
    planes = start(3, positions=(COMPUTES, BACKWARD, GATHER), hang_timeout=1.0)
    planes[0].close()
    wait_until(lambda: planes[2].failure)
    assert "rank 0 (node 0) | has ended its run" in planes[2].failure


def test_ranks_that_live_but_make_no_progress_are_reported_once(start, capfd):
    planes = start(2, positions=(BACKWARD, COMPUTES), hang_timeout=1.0)
    time.sleep(3.0)
    assert planes[0].failure is None
    said = capfd.readouterr().err
    assert said.count("no rank made progress for 1 s (hang_timeout), and the run goes on\n") == 1
    assert "rank 0 (node 0) | backward | starting | train.py:9 (main)\n" in said
    assert "rank 1 (node 0) | is busy  | starting | train.py:5 (log)\n" in said


# ---- barriers --------------------------------------------------------------------------------------------------------


def test_ranks_wait_for_each_other_at_each_barrier(start):
    planes, passed = start(3), []

    def come(plane):
        plane.barrier()
        passed.append(plane.rank)

    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            first = [pool.submit(come, plane) for plane in planes[1:]]
            time.sleep(0.1)
            assert not passed
            come(planes[0])
            for each in first:
                each.result(timeout=10)
        assert sorted(passed) == [0, 1, 2]
        passed.clear()


def test_ranks_with_different_reasons_at_a_barrier_fail(start):
    planes = start(2)
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(planes[0].barrier, "save"), pool.submit(planes[1].barrier, "run", " trainer.fit")]:
            with pytest.raises(
                RankFailure, match=r"rank 1 .* called trainer\.fit.*, and rank 0 .* called trainer\.save_che"
            ):
                each.result(timeout=10)


def test_a_rank_that_trains_on_past_a_barrier_ends_the_run(start):
    planes = start(2)
    planes[1].should_stop()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(planes[1].barrier, "end")
        assert not any(planes[0].should_stop() for _ in range(2))
        message = r"rank 1 \(node 0\) ended training after 1 batches of the run.*, and rank 0 \(node 0\) trains on with"
        with pytest.raises(RankFailure, match=message):
            waiting.result(timeout=10)


@pytest.mark.parametrize("ending", [ControlPlane.close, lambda plane: plane.report_failure(ValueError("no"))])
def test_a_barrier_to_which_rank_zero_does_not_come_raises(start, ending):
    planes = start(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(planes[1].barrier)
        time.sleep(0.2)
        ending(planes[0])
        with pytest.raises(RankFailure, match=r"and rank 0 \(node 0\) has ended its run|failed: ValueError: no"):
            waiting.result(timeout=10)


def test_a_barrier_ends_after_the_timeout(start, monkeypatch):
    plane = start(2)[1]
    monkeypatch.setattr(plane, "_timeout", 0.2)
    with pytest.raises(RankFailure, match=r"rank 1 .* has waited in test_plane\.py:\d+ .* for timeout=0\.2 s"):
        plane.barrier()


# ---- common stops ----------------------------------------------------------------------------------------------------


def begin(planes: list[ControlPlane], batches: tuple[int, ...]) -> None:
    for plane, begun in zip(planes, batches, strict=True):
        assert not any(plane.should_stop() for _ in range(begun))


def stopping_batches(planes: list[ControlPlane], batches: tuple[int, ...]) -> list[int]:
    """The batch at which each stops, having begun so many."""
    stopped_at = []
    for plane, begun in zip(planes, batches, strict=True):
        while not plane.should_stop():
            begun += 1
            assert begun < 50
        stopped_at.append(begun + 1)
    return stopped_at


@pytest.mark.parametrize("asking", [0, 1, 2])
def test_all_ranks_stop_at_one_batch_however_far_apart_they_are(start, asking):
    planes, begun = start(3), (3, 10, 6)
    begin(planes, begun)
    planes[asking].request_stop()
    wait_until(lambda: all(plane.stop_requested for plane in planes))
    assert stopping_batches(planes, begun) == [11, 11, 11]
    assert all(plane.stops_together for plane in planes)


def test_all_ranks_stop_at_one_batch_to_be_queued_again(start):
    planes, begun = start(3), (3, 10, 6)
    begin(planes, begun)
    for plane in planes[:2]:  # SLURM signals one a little before the other, and the third later
        plane.request_requeue()
    wait_until(lambda: all(plane.requeue_requested for plane in planes))
    planes[2].request_requeue()
    assert stopping_batches(planes, begun) == [11, 11, 11]
    assert not any(plane.stop_requested for plane in planes)


def test_a_stop_during_a_requeue_changes_nothing(start):
    planes, begun = start(2), (3, 6)
    begin(planes, begun)
    planes[0].request_requeue()
    wait_until(lambda: all(plane.requeue_requested for plane in planes))
    planes[0].request_stop()
    assert stopping_batches(planes, begun) == [7, 7]
    assert all(plane.requeue_requested for plane in planes)


# ---- the store -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen, Callable[[], Store]]]:
    """The process of a store, and a function that connects to it."""
    start = "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); print(store.port, flush=True)"
    program = f"import time; from torch.distributed import TCPStore; {start}; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    port = int(process.stdout.readline())
    yield process, lambda: TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("number", "named"),
    [
        (signal.SIGKILL, "rank 0 died, and torch's store with it"),
        (signal.SIGSTOP, "rank 0 is frozen: torch's store there has not answered for 1 s"),
    ],
)
def test_a_store_that_is_lost_is_the_end_of_rank_zero(start, server, monkeypatch, number, named):
    planes = start(2, stores=server[1], hang_timeout=1.0)
    wait_until(lambda: all(plane._watch._neighbors[0].status for plane in planes))  # noqa: SLF001
    monkeypatch.setattr(control.process, "end_frozen", lambda who: None)
    os.kill(server[0].pid, number)
    wait_until(lambda: [plane.failure for plane in planes] == [named] * 2)


def test_a_common_stop_after_the_end_of_rank_zero_raises(start, server):
    planes = start(2, stores=server[1])
    planes[0].close()
    planes[1].request_requeue()
    wait_until(lambda: planes[1].requeue_requested)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(planes[1].should_stop)
        time.sleep(0.2)
        server[0].kill()
        with pytest.raises(RuntimeError):
            waiting.result(timeout=10)


class CountingStore(Store):
    """Counts the requests of one rank."""

    def __init__(self, shared: Store, requests: list[str]) -> None:
        super().__init__()
        self._shared, self._requests = shared, requests

    def __getattribute__(self, name: str) -> object:
        if name.startswith("_"):
            return super().__getattribute__(name)
        self._requests.append(name)
        return getattr(self._shared, name)


def test_a_heartbeat_is_two_requests_and_a_batch_is_none(start):
    requests: list[str] = []
    shared = HashStore()
    planes = start(2, stores=lambda: CountingStore(shared, requests), hang_timeout=5.0)
    wait_until(lambda: requests.count("multi_get") >= 4)
    del requests[:]
    assert not any(planes[0].should_stop() for _ in range(1000))
    time.sleep(1.2)
    assert {*requests} == {"set", "multi_get"}
    assert len(requests) <= 2 * 2 * (1.3 / 0.5 + 1)


@pytest.mark.parametrize(
    ("size", "hang_timeout", "seconds"), [(4, None, 1.0), (4, 5.0, 0.5), (1000, 300.0, 1.0), (4000, 300.0, 4.0)]
)
def test_heartbeats_are_seconds_apart(size, hang_timeout, seconds):
    assert seconds_between_beats(size, hang_timeout) == seconds
