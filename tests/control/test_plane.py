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
from lightning_hiercomm.control.bootstrap import LOST_STORE
from lightning_hiercomm.control.plane import ControlPlane, RankFailure

Start = Callable[..., list[ControlPlane]]


@pytest.fixture
def start(monkeypatch) -> Iterator[Start]:
    """``start(size, **settings)``: connected ranks that wait in ``calls``; the ``silent`` ones send one heartbeat."""
    monkeypatch.setattr(control, "_BEAT", 0.1)
    monkeypatch.setattr(control, "_GRACE", 60.0)  # a rank that is not ended by its failure would take the tests with it
    planes: list[ControlPlane] = []
    called: dict[int, str] = {}

    def waits() -> tuple[str, str]:
        own = threading.current_thread()
        return next((called.get(plane.rank, "") for plane in planes if own in plane._threads), ""), "train.py:9 (main)"  # noqa: SLF001

    monkeypatch.setattr(control.heartbeat, "where_main_thread_waits", waits)

    def connect(
        size: int,
        silent: tuple[int, ...] = (),
        calls: tuple[str, ...] = (),
        store: Callable[[], Store] | None = None,
        **settings: float,
    ) -> list[ControlPlane]:
        planes.extend(ControlPlane(rank, size, f"rank {rank} (node 0)", **settings) for rank in range(size))
        called.update(enumerate(calls))
        shared = HashStore()
        for plane in planes:
            if plane.rank in silent:
                monkeypatch.setattr(plane, "_run", lambda: None)
            plane.start(store() if store else shared, "control")
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


def test_the_first_failure_reaches_every_rank_by_name(start):
    planes = start(3)
    planes[1].report_failure(ValueError("boom"))
    assert planes[0].wait_for_failure(5.0) is not None
    planes[0].report_failure(ValueError("its consequence"))
    for plane in (planes[0], planes[2]):
        assert plane.wait_for_failure(5.0) == "rank 1 (node 0) failed: ValueError: boom"
        with pytest.raises(RankFailure, match=r"rank 1 \(node 0\) failed"):
            plane.should_stop()


def test_a_failure_just_before_a_rank_leaves_is_reported_and_cut(start):
    planes = start(2)
    planes[0].report_failure(ValueError("ä" * 100_000))
    planes[0].close()
    failure = planes[1].wait_for_failure(5.0)
    assert failure.startswith("rank 0 (node 0) failed: ValueError: ää")
    assert len(failure) == 2000


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_rank_that_does_not_end_after_a_failure_is_ended(start, monkeypatch, capfd, is_closed):
    ended = threading.Event()
    planes = start(2)
    monkeypatch.setattr(control, "_GRACE", 0.5)
    monkeypatch.setattr(control.os, "_exit", lambda code: ended.set())
    planes[1].report_failure(ValueError("no"))
    assert planes[0].wait_for_failure(5.0)
    if is_closed:
        planes[0].close()
    assert ended.wait(2.0) != is_closed
    last = "failed: ValueError: no. Ending rank 0 (node 0), which is waiting for it.\n"
    assert capfd.readouterr().err.endswith(last) != is_closed


def test_leaving_is_no_failure(start):
    planes = start(3, hang_timeout=1.0)
    planes[2].close()
    planes[1].close()
    assert planes[0].wait_for_failure(1.5, collective_broke=True) is None


@pytest.mark.parametrize("has_left", [False, True])
def test_an_ended_process_of_this_machine_is_a_death_unless_it_left(start, monkeypatch, has_left):
    monkeypatch.setattr(control.heartbeat, "has_ended", lambda who: who == "ended")
    planes = start(3)
    wait_until(lambda: 2 in planes[1]._watched)  # noqa: SLF001
    if has_left:
        planes[2].close()
    planes[1]._watched[2] = planes[1]._watched[2]._replace(process="ended")  # noqa: SLF001
    assert planes[1].wait_for_failure(1.0) == (None if has_left else "rank 2 (node 0) died")


def test_a_silent_rank_has_died_if_a_collective_broke(start, capfd):
    planes = start(3, silent=(2,))
    assert planes[1].wait_for_failure(1.0) is None
    assert planes[0].wait_for_failure(5.0, collective_broke=True) == "rank 2 (node 0) died"
    assert planes[1].wait_for_failure(5.0) == "rank 2 (node 0) died"
    # it is printed at once, because a launcher may end everybody else
    assert capfd.readouterr().err == "lightning_hiercomm: rank 2 (node 0) died\n"


# ---- ranks that make no progress -------------------------------------------------------------------------------------


def test_a_silent_rank_for_which_all_wait_is_frozen_and_is_killed(start, capfd, monkeypatch):
    ended = []
    monkeypatch.setattr(control.heartbeat, "end_frozen", ended.append)
    planes = start(3, silent=(2,), calls=("backward", "backward", ""), hang_timeout=1.0)
    table = planes[0].wait_for_failure(8.0)
    named = "no rank made progress for 1 s (hang_timeout): rank 2 (node 0) is frozen: it sent nothing"
    assert table.startswith(f"{named}\n")
    assert planes[1].wait_for_failure(5.0) == table
    wait_until(lambda: ended == [control.heartbeat.identity()] * 2)
    assert capfd.readouterr().err.count(f"lightning_hiercomm: {named}\n") == 1


def test_ranks_that_wait_in_different_places_end_the_run_with_a_table(start, capfd):
    planes = start(2, calls=("backward", "all_gather"), hang_timeout=1.0)
    table = planes[1].wait_for_failure(8.0)
    assert "\nrank 1 (node 0) | all_gather | starting | train.py:9 (main)\n" in table
    assert capfd.readouterr().err.count(f"lightning_hiercomm: {table}\n") == 1


@pytest.mark.parametrize("calls", [("backward", ""), ("backward", "backward")], ids=["busy", "slow"])
def test_ranks_that_wait_for_a_busy_one_or_a_slow_exchange_go_on_after_one_table(start, capfd, calls):
    planes = start(2, calls=calls, hang_timeout=0.5)
    assert planes[0].wait_for_failure(4.0) is None
    assert capfd.readouterr().err.count("no rank made progress for 0.5 s (hang_timeout): the run goes on\n") == 1


def test_a_rank_that_calls_collectives_now_and_then_is_busy(start, monkeypatch):
    planes = start(2, hang_timeout=1.0)
    lines = iter(range(10**6))  # a loop of rank 1 with a backward pass, and a barrier where rank 0 waits
    busy = planes[1]._threads[0]  # noqa: SLF001
    place = lambda: f"train.py:{next(lines) if threading.current_thread() is busy else 3} (main)"  # noqa: E731
    monkeypatch.setattr(control.heartbeat, "where_main_thread_waits", lambda: ("backward", place()))
    assert planes[0].wait_for_failure(3.0) is None


@pytest.mark.parametrize("moves", ["progress", "collectives"])
def test_ranks_that_make_progress_are_in_no_deadlock(start, moves):
    begun = [0]
    counted = {"count_collectives": lambda: (3, begun[0])} if moves == "collectives" else {}
    planes = start(2, calls=("backward", "all_gather"), hang_timeout=1.0, **counted)
    for _ in range(25):
        assert planes[0].wait_for_failure(0.1) is None
        begun[0] += 1
        planes[1].progress += moves == "progress"


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


@pytest.mark.parametrize(
    ("reasons", "steps"),
    [(("called trainer.fit", "ended an epoch"), ([4], [4])), (("ended an epoch", "ended an epoch"), ([4, 1], [5, 1]))],
    ids=["reasons", "steps"],
)
def test_ranks_that_differ_at_a_barrier_fail_with_both_sides(start, reasons, steps):
    planes = start(2)
    planes[1].should_stop()
    for plane, taken in zip(planes, steps, strict=True):
        plane.steps = lambda taken=taken: taken
    sides = [f"{reasons[0]}, {', '.join(map(str, steps[0]))} optimizer steps in train.py:9 (main)"]
    sides += [f"{reasons[1]}, {', '.join(map(str, steps[1]))} optimizer steps after 1 batches of the run in train"]
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(plane.barrier, why) for plane, why in zip(planes, reasons, strict=True)]:
            with pytest.raises(RankFailure) as caught:
                each.result(timeout=10)
            assert str(caught.value).startswith(f"rank 0 (node 0) {sides[0]}, and rank 1 (node 0) {sides[1]}")
            assert "All ranks must do the same after equally many steps" in str(caught.value)


def test_a_barrier_to_which_a_failed_rank_does_not_come_raises(start):
    planes = start(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(planes[1].barrier)
        time.sleep(0.2)
        planes[0].report_failure(ValueError("no"))
        with pytest.raises(RankFailure, match="failed: ValueError: no"):
            waiting.result(timeout=10)


def test_a_barrier_to_which_a_rank_that_has_left_does_not_come_is_a_deadlock(start):
    planes = start(2, calls=("", "on_train_end"), hang_timeout=1.0)
    planes[0].close()
    with pytest.raises(RankFailure, match=r"rank 0 \(node 0\) \| has ended its run"):
        planes[1].barrier("ended training")


def test_a_barrier_ends_after_the_timeout(start):
    planes = start(2, timeout=0.2)
    with pytest.raises(
        RankFailure, match=r"rank 1 .* train\.py:9 .* has waited there for other ranks for timeout=0\.2 s"
    ):
        planes[1].barrier()
    assert "rank 1 (node 0) asked for the averaged model in" in planes[0].wait_for_failure(5.0)


# ---- the common stop -------------------------------------------------------------------------------------------------


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
    wait_until(lambda: all(plane.stops_for for plane in planes))
    assert stopping_batches(planes, begun) == [11, 11, 11]
    assert all(plane.stops_together for plane in planes)


def test_all_ranks_stop_for_the_reason_of_the_first(start):
    planes = start(3)
    planes[1].request_stop("requeue")
    wait_until(lambda: all(plane.stops_for for plane in planes))
    planes[2].request_stop()
    assert stopping_batches(planes, (0, 0, 0)) == [1, 1, 1]
    assert [plane.stops_for for plane in planes] == ["requeue"] * 3


def test_a_rank_that_is_not_connected_stops_by_itself():
    plane = ControlPlane()
    assert not plane.should_stop()
    plane.request_stop("requeue")
    assert plane.should_stop()
    assert (plane.stops_for, plane.stops_together) == ("requeue", True)


# ---- the store -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen, Callable[[], Store]]]:
    """The process of a store, and a function that connects to it."""
    start = "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); print(store.port, flush=True)"
    program = f"import time; from torch.distributed import TCPStore; {start}; time.sleep(60)"
    host = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    port = int(host.stdout.readline())
    yield host, lambda: TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    host.kill()
    host.communicate()


@pytest.mark.parametrize(
    ("number", "named"),
    [
        (signal.SIGKILL, LOST_STORE),
        (signal.SIGSTOP, "rank 0, or torchrun's agent there, is frozen: torch's store does not answer"),
    ],
)
def test_a_store_that_is_lost_ends_the_run(start, server, number, named):
    host, connect = server
    planes = start(2, store=connect, hang_timeout=1.0)
    wait_until(lambda: all(plane._beats > 2 for plane in planes))  # noqa: SLF001
    os.kill(host.pid, number)
    assert [plane.wait_for_failure(8.0) for plane in planes] == [named] * 2


def test_a_store_that_ends_after_a_rank_has_left_is_no_failure(start, server):
    host, connect = server
    planes = start(2, store=connect, hang_timeout=1.0)
    planes[0].close()
    wait_until(lambda: planes[1]._has_other_left)  # noqa: SLF001
    host.kill()
    assert planes[1].wait_for_failure(3.0) is None


class CountingStore(Store):
    """Counts the requests to a store by name."""

    def __init__(self, shared: Store, requests: list[str]) -> None:
        super().__init__()
        self._shared, self._requests = shared, requests

    def __getattribute__(self, name: str) -> object:
        if name.startswith("_"):
            return super().__getattribute__(name)
        self._requests.append(name)
        return getattr(self._shared, name)


def test_a_heartbeat_is_two_requests_and_a_batch_is_none(start):
    requests, shared = [], HashStore()
    for key in ("failure", "stop", "left"):
        shared.set(key, "0" if key == "left" else "")
    planes = start(2, hang_timeout=5.0)
    wait_until(lambda: [len(plane._watched) for plane in planes] == [2, 1])  # noqa: SLF001
    for plane in planes:
        plane._store = CountingStore(shared, requests)  # noqa: SLF001
    assert not any(planes[0].should_stop() for _ in range(1000))
    time.sleep(1.0)
    assert {*requests} == {"set", "multi_get"}
    assert 10 <= len(requests) <= 2 * 2 * 12
