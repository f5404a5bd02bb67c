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
from functools import partial

import pytest
from torch.distributed import HashStore, Store, TCPStore

from lightning_hiercomm.control import plane as control
from lightning_hiercomm.control import process
from lightning_hiercomm.control.plane import ControlPlane, RankFailure, Watch, seconds_between_beats
from lightning_hiercomm.control.waiting import MainThread, Position


class Stays(MainThread):
    """A main thread that stays somewhere."""

    def __init__(self, position: Position) -> None:
        self._position = position

    def position(self) -> Position:
        return self._position


Start = Callable[..., list[ControlPlane]]


@pytest.fixture
def start(monkeypatch) -> Iterator[Start]:
    """``start(size, **settings)``: connected ranks, the ``silent`` ones of which do nothing."""
    monkeypatch.setattr(control.process.StuckDetector, "check", lambda self: ("", 0.0))  # pytest has stopped children
    planes: list[ControlPlane] = []
    run = Watch._run  # noqa: SLF001

    def connect(
        size: int,
        silent: tuple[int, ...] = (),
        positions: tuple[Position, ...] = (),
        stores: Callable[[], Store] | None = None,
        hang_timeout: float | None = None,
    ) -> list[ControlPlane]:
        # `grace` is long: a rank that is not ended by its failure would take the test process with it
        for rank in range(size):
            thread = Stays(positions[rank]) if positions else None
            planes.append(ControlPlane(rank, size, f"rank {rank} (node 0)", 60.0, hang_timeout, thread))
        monkeypatch.setattr(Watch, "_run", lambda self: None if self._plane.rank in silent else run(self))
        shared, together, values = HashStore(), threading.Barrier(size, timeout=20.0), {}

        def join(plane: ControlPlane) -> None:
            def gather(own: list, among: str = "") -> list:
                values[plane.rank] = own
                together.wait()
                return [[rank, ["", "", ""]] for rank in range(size)]

            plane.start(stores() if stores else shared, gather)

        with ThreadPoolExecutor(size) as threads:
            [*threads.map(join, planes)]
        return planes

    yield connect
    for plane in reversed(planes):
        plane.close()


BUSY = Position(seconds=60.0, digest="c", line="train.py:5 (log)")
BACKWARD = Position(seconds=60.0, call="backward", digest="a", line="train.py:9 (main)", collectives=3)
GATHER = Position(seconds=60.0, call="torch.distributed.all_gather", digest="b", collectives=3)


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


def test_leaving_is_no_failure(start):
    planes = start(3, positions=(BUSY,) * 3, hang_timeout=1.0)
    planes[2].close()
    planes[1].close()
    assert planes[0].wait_for_failure(1.5) is None  # it sees neither of them as frozen


@pytest.mark.parametrize("has_left", [False, True])
def test_an_ended_process_of_this_machine_is_a_death_unless_it_left(start, capfd, has_left):
    planes = start(3)
    if has_left:
        planes[2].close()
    planes[0].processes = {2: ["here", "2147483647", "12"]}  # rank 1 is on another machine
    expected = None if has_left else "rank 2 (node 0) died"
    assert planes[0].wait_for_failure(1.5 if has_left else 5.0) == expected
    # it is printed at once, because a launcher may end everybody else
    assert capfd.readouterr().err == ("" if has_left else f"lightning_hiercomm: {expected}\n")


def test_a_silent_rank_has_died_if_a_collective_broke(start):
    planes = start(3, silent=(2,), hang_timeout=10.0)
    assert planes[1].wait_for_failure(1.0) is None
    assert planes[0].wait_for_failure(10.0, collective_broke=True) == "rank 2 (node 0) died"


def test_a_silent_rank_is_frozen_after_hang_timeout(start, capfd, monkeypatch):
    ended = []
    monkeypatch.setattr(control.process, "end_frozen", ended.append)
    planes = start(3, silent=(2,), positions=(BUSY,) * 3, hang_timeout=1.0)
    for plane in planes[:2]:
        plane.processes, plane.grace = {2: ["", "", ""]}, 0.2
    monkeypatch.setattr(control.process, "end_after", lambda *_: None)
    message = "rank 2 (node 0) is frozen: it sent nothing for 1 s, and before it was starting"
    assert [plane.wait_for_failure(5.0) for plane in planes[:2]] == [message] * 2
    wait_until(lambda: ended == [["", "", ""]] * 2)
    said = capfd.readouterr().err
    assert said.count(f"lightning_hiercomm: {message}\n") == 1
    assert said.count(f"{message}. What rank ") == 2  # stacks


def test_a_rank_whose_worker_is_stuck_reports_itself(start, monkeypatch):
    planes = start(2, hang_timeout=1.0)
    monkeypatch.setattr(control.process.StuckDetector, "check", lambda self: ("its worker 7", 1.5))
    assert "is frozen: its worker 7 has been stopped or stuck for 1 s" in planes[0].wait_for_failure(5.0)


def test_ranks_that_were_stopped_are_neither_silent_nor_in_a_deadlock(start, monkeypatch):
    planes = start(2, positions=(BACKWARD, GATHER), hang_timeout=2.0)
    stopped, clock = threading.Event(), time.monotonic
    monkeypatch.setattr(control.time, "monotonic", lambda: clock() + 1000.0 * stopped.is_set())
    stopped.set()
    assert planes[0].wait_for_failure(1.0) is planes[1].failure is None


# ---- ranks that make no progress -------------------------------------------------------------------------------------


def test_ranks_that_wait_in_different_places_end_the_run_with_a_table(start, capfd):
    planes = start(2, positions=(BACKWARD, GATHER), hang_timeout=1.0)
    table = planes[1].wait_for_failure(5.0)
    assert "rank 1 (node 0) | torch.distributed.all_gather | starting" in table
    assert capfd.readouterr().err.count(f"lightning_hiercomm: {table}\n") == 1


def test_ranks_that_live_but_do_not_get_on_dump_their_stacks_once(start, capfd):
    requests, shared = [], HashStore()
    stores = partial(InterceptedStore, shared, requests.append)
    planes = start(2, positions=(BACKWARD, BUSY), stores=stores, hang_timeout=1.0)
    assert planes[0].wait_for_failure(3.0) is None
    assert "get" not in requests  # one request for all ranks
    said = capfd.readouterr().err
    assert said.count("no rank made progress for 1 s (hang_timeout), and the run goes on\n") == 1
    assert "\nrank 0 (node 0) | backward | starting | train.py:9 (main)\n" in said
    assert "\nrank 1 (node 0) | is busy  | starting | train.py:5 (log)\n" in said
    assert [said.count(f"what rank {rank} (node 0) does, which is starting:") for rank in (0, 1)] == [1, 1]


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
                RankFailure, match=r"rank 1 .* called trainer\.fit.*, and rank 0 .* called trainer\.save"
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
    planes = start(2)
    monkeypatch.setattr(planes[1], "_timeout", 0.2)
    with pytest.raises(RankFailure, match=r"rank 1 .* has waited in test_plane\.py:\d+ .* for timeout=0\.2 s"):
        planes[1].barrier()
    assert "rank 1 (node 0) has waited in test_plane.py" in planes[0].wait_for_failure(5.0)


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


def test_all_ranks_save_at_one_batch_to_be_queued_again_and_train_on(start):
    planes, begun = start(3), (3, 10, 6)
    begin(planes, begun)
    for plane in planes[:2]:  # SLURM signals one a little before the other, and the third later
        plane.request_requeue()
    wait_until(lambda: all(plane.requeue_requested for plane in planes))
    assert not any(plane.stop_requested for plane in planes)
    planes[2].request_requeue()
    assert stopping_batches(planes[:2], begun[:2]) == [11, 11]
    for plane in planes[:2]:
        plane.go_on()
    assert not any(planes[0].should_stop() for _ in range(4))
    assert stopping_batches(planes[2:], begun[2:]) == [11]
    planes[2].go_on()
    planes[1].request_stop()
    wait_until(lambda: all(plane.stop_requested for plane in planes))
    assert not any(plane.requeue_requested for plane in planes)
    assert stopping_batches(planes, (15, 11, 11)) == [16, 16, 16]


def test_stop_during_requeue_does_both(start):
    planes, begun = start(2), (3, 6)
    begin(planes, begun)
    planes[0].request_requeue()
    planes[0].request_stop()
    wait_until(lambda: all(plane.requeue_requested for plane in planes))
    assert stopping_batches(planes, begun) == [7, 7]
    for plane in planes:
        plane.go_on()
    time.sleep(1.5)  # a heartbeat: the rank that asked does not show when it begins to wait
    assert all(plane.stop_requested for plane in planes)
    assert stopping_batches(planes, (7, 7)) == [8, 8]
    assert not any(plane.requeue_requested for plane in planes)


# ---- the store -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen, Callable[[], Store]]]:
    """The process of a store, and a function that connects to it."""
    start = "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); print(store.port, flush=True)"
    fork = "signal.signal(signal.SIGUSR1, lambda *_: print(os.fork(), flush=True))"
    program = f"import os, signal, time; from torch.distributed import TCPStore; {fork}; {start}; time.sleep(60)"
    host = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    port = int(host.stdout.readline())
    yield host, lambda: TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    os.killpg(host.pid, signal.SIGKILL)
    host.communicate()


@pytest.mark.parametrize(
    ("number", "has_worker", "named"),
    [
        (signal.SIGKILL, False, "rank 0 died, and torch's store with it"),
        (signal.SIGKILL, True, "rank 0 died, and torch's store with it"),  # which keeps the connections open
        (signal.SIGSTOP, False, "rank 0 is frozen: torch's store there has not answered for 1 s"),
    ],
)
def test_a_store_that_is_lost_is_the_end_of_rank_zero(start, server, number, has_worker, named):
    host, connect = server
    planes = start(2, stores=connect, hang_timeout=1.0 if number == signal.SIGSTOP else None)
    for plane in planes if has_worker else ():
        plane.processes = {0: ["here", str(host.pid), process._started(host.pid)]}  # noqa: SLF001
    if has_worker:
        os.kill(host.pid, signal.SIGUSR1)
        assert host.stdout.readline()
    os.kill(host.pid, number)
    assert [plane.wait_for_failure(8.0) for plane in planes] == [named] * 2


@pytest.mark.parametrize("host", ["rank 0", "torchrun's agent on n0"])
def test_a_requeue_after_the_end_of_the_stores_host_raises(start, server, monkeypatch, host):
    monkeypatch.setattr(control, "store_host", lambda: host)
    planes = start(2, stores=server[1])
    planes[0].close()
    planes[1].request_requeue()
    wait_until(lambda: planes[1].requeue_requested)
    threading.Timer(0.2, server[0].kill).start()
    with pytest.raises(RankFailure, match=rf"^{host} has ended its run, and rank 1 \(node 0\) waits for it$"):
        planes[1].should_stop()


class InterceptedStore(Store):
    """Calls a function with the name of each request."""

    def __init__(self, shared: Store, intercept: Callable[[str], object]) -> None:
        super().__init__()
        self._shared, self._intercept = shared, intercept

    def __getattribute__(self, name: str) -> object:
        if name.startswith("_"):
            return super().__getattribute__(name)
        self._intercept(name)
        return getattr(self._shared, name)


def test_rank_zero_is_named_if_its_store_stops_while_its_process_is_checked(start):
    shared, is_over = HashStore(), threading.Event()
    stores = partial(InterceptedStore, shared, lambda name: name == "get" and is_over.wait(20.0))
    planes = start(2, stores=stores, hang_timeout=5.0)
    planes[1].processes = {0: ["here", "2147483647", "12"]}
    assert planes[1].wait_for_failure(4.5) == "rank 0 died, and torch's store with it"
    is_over.set()


def test_a_heartbeat_is_two_requests_and_a_batch_is_none(start):
    requests, shared = [], HashStore()
    planes = start(2, stores=partial(InterceptedStore, shared, requests.append), hang_timeout=5.0)
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
