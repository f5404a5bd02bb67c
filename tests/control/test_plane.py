"""The control plane, its ranks being threads of this process."""

from __future__ import annotations

import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_hiercomm.control import plane as control
from lightning_hiercomm.control.connection import HubLink, Invitation, authenticate, connect
from lightning_hiercomm.control.plane import ControlPlane, RankFailure


class Star:
    def __init__(self) -> None:
        self.planes: list[ControlPlane] = []
        self.invitation: Invitation

    def __call__(self, size: int, host: str = "127.0.0.1", joining: int | None = None) -> list[ControlPlane]:
        # `grace` is long: a rank that is not ended by its failure would take the test process with it
        self.planes = [ControlPlane(rank, size, f"rank {rank} (node 0)", grace=60.0) for rank in range(size)]
        self.invitation = self.planes[0].link.invite(host)
        for plane in self.planes[:joining]:
            plane.join(self.invitation)
        return self.planes


@pytest.fixture
def star() -> Iterator[Star]:
    star = Star()
    yield star
    for plane in reversed(star.planes):
        plane.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stopping_batches(planes: list[ControlPlane], batches: tuple[int, ...]) -> list[int]:
    """The batch at which each stops, having begun so many."""
    stopped_at = []
    for plane, begun in zip(planes, batches, strict=True):
        while not plane.should_stop():
            begun += 1
            assert begun < 50
        stopped_at.append(begun + 1)
    return stopped_at


def test_a_failure_reaches_every_rank_by_name(star):
    planes = star(3)
    planes[1].report_failure(ValueError("boom"))
    for plane in (planes[0], planes[2]):
        assert plane.wait_for_failure(5.0) == "rank 1 (node 0) failed: ValueError: boom"
        with pytest.raises(RankFailure, match=r"rank 1 \(node 0\) failed"):
            plane.should_stop()


def test_a_failure_of_many_words_is_cut(star):
    planes = star(2)
    planes[1].report_failure(ValueError("ä" * 100_000))
    failure = planes[0].wait_for_failure(5.0)
    assert failure is not None
    assert failure.startswith("rank 1 (node 0) failed: ValueError: ää")
    assert len(failure) == 2000


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_connection_that_breaks_is_a_death(star, capfd, host):
    planes = star(2, host, joining=1)
    channel, _ = authenticate(connect(star.invitation, 5.0), star.invitation.token, 1, planes[1].place)
    channel.close()
    assert planes[0].wait_for_failure(5.0) == "rank 1 (node 0) died"
    # the hub says so itself, because a launcher may end everybody else at once
    assert capfd.readouterr().err == "lightning_hiercomm: rank 1 (node 0) died\n"


def test_leaving_is_no_failure(star):
    planes = star(3)
    planes[2].close()
    planes[0].close()
    assert planes[1].wait_for_failure(0.5) is None


def test_ranks_wait_for_each_other_at_a_barrier(star):
    planes, passed = star(3), []

    def come(plane):
        plane.barrier()
        passed.append(plane.rank)

    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(come, plane) for plane in planes[1:]]
        time.sleep(0.2)
        assert not passed
        come(planes[0])
        for each in first:
            each.result(timeout=10)
    assert sorted(passed) == [0, 1, 2]


@pytest.mark.parametrize("ending", [ControlPlane.close, lambda plane: plane.report_failure(ValueError("no"))])
def test_a_barrier_to_which_rank_zero_does_not_come_raises(star, ending):
    planes = star(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(planes[1].barrier)
        time.sleep(0.2)
        ending(planes[0])
        with pytest.raises(
            RankFailure, match=r"rank 0 (has ended its run, .* for it|\(node 0\) failed: ValueError: no)"
        ):
            waiting.result(timeout=10)


def test_a_barrier_ends_after_the_timeout(star, monkeypatch):
    plane = star(2)[1]
    monkeypatch.setattr(plane, "_timeout", 0.2)
    with pytest.raises(RankFailure, match=r"rank 1 .* has waited in test_plane\.py:\d+ .* for timeout=0\.2 s"):
        plane.barrier()


@pytest.mark.parametrize("asking", [0, 1, 2])
def test_all_ranks_stop_at_one_batch_however_far_apart_they_are(star, asking):
    planes, begun = star(3), (3, 10, 6)
    for plane, batches in zip(planes, begun, strict=True):
        assert not any(plane.should_stop() for _ in range(batches))
    planes[asking].request_stop()
    wait_until(lambda: all(plane.stop_requested for plane in planes))
    assert stopping_batches(planes, begun) == [11, 11, 11]
    assert all(plane.stops_together for plane in planes)


def test_all_ranks_save_at_one_batch_to_be_queued_again_and_train_on(star):
    planes, begun = star(3), (3, 10, 6)
    for plane, batches in zip(planes, begun, strict=True):
        assert not any(plane.should_stop() for _ in range(batches))
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


def test_stop_during_requeue_does_both(star):
    planes, begun = star(2), (3, 6)
    for plane, batches in zip(planes, begun, strict=True):
        assert not any(plane.should_stop() for _ in range(batches))
    planes[0].request_requeue()
    planes[0].request_stop()
    wait_until(lambda: all(plane.requeue_requested for plane in planes))
    assert stopping_batches(planes, begun) == [7, 7]
    for plane in planes:
        plane.go_on()
    wait_until(lambda: all(plane.stop_requested for plane in planes))
    assert stopping_batches(planes, (7, 7)) == [8, 8]
    assert not any(plane.requeue_requested for plane in planes)


def test_without_a_hub_ranks_continue_and_stop_alone(star, caplog):
    planes = star(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(planes[1].barrier)
        os.kill(planes[0].link.process.pid, 9)
        waiting.result(timeout=10)
    wait_until(lambda: sum("lost the control plane's hub and continues" in each for each in caplog.messages) == 2)
    assert not planes[1].should_stop()
    planes[1].request_stop()
    assert planes[1].should_stop()
    assert not planes[1].stops_together
    assert not planes[0].should_stop()
    assert planes[0].failure is planes[1].failure is None


def test_a_hub_that_is_lost_with_rank_zero_is_a_death(star):
    planes = star(2)
    hub, planes[0].link.process = planes[0].link.process, None
    planes[0]._closing.set()  # noqa: SLF001
    assert planes[0].link.listener is not None
    planes[0].link.listener.close()
    planes[0].link.listener = None
    hub.kill()
    hub.communicate()
    assert planes[1].wait_for_failure(5.0) == "rank 0 died, and the control plane's hub with it"


# ---- joining together or not at all ----------------------------------------------------------------------------------


class Gathering:
    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20.0)
        self._values: dict[int, object] = {}

    def __call__(self, rank: int, value: object) -> list:
        self._values[rank] = value
        self._barrier.wait()
        values = [self._values[rank] for rank in range(self.size)]
        self._barrier.wait()
        return values


def start_all(size: int, host: str, port: int = 0) -> list[ControlPlane | None]:
    gathering = Gathering(size)

    def start(rank: int) -> ControlPlane | None:
        plane = ControlPlane(rank, size, f"rank {rank} (node {rank})")
        gather = lambda own, alarm, among="", aloud=False: gathering(rank, own)  # noqa: E731
        return plane if plane.start(host, port, lambda own: gathering(rank, own)[0], gather) else None

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(start, range(size)))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0"])
def test_all_ranks_join_with_any_form_of_address(host, caplog):
    planes = start_all(3, host)
    assert all(plane is not None and plane.is_connected for plane in planes)
    assert all(list(plane.processes) == [0, 1, 2] for plane in planes)
    assert {plane.processes[2][1] for plane in planes} == {str(os.getpid())}
    for plane in reversed(planes):
        plane.close()
    assert not caplog.messages


def test_a_frozen_rank_is_ended_by_its_neighbours_before_they_leave(star, monkeypatch):
    first, _ = star(2)
    ended: list[object] = []
    monkeypatch.setattr(control.process, "end_process", ended.append)
    first.processes, first.grace = {1: ["here", "4711", "12"]}, 0.2
    monkeypatch.setattr(control.process, "end_after", lambda *_: None)
    first.receive({"kind": "failed", "message": "rank 1 is frozen", "frozen": True, "silent": [0, 1]})
    assert not ended  # it is still dumping its stacks
    first.close()
    assert ended == [["here", "4711", "12"]]


def test_only_the_address_of_the_ranks_listens(star):
    star(1)
    assert star.planes[0].link.listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", star.invitation.port), timeout=5.0)


def test_no_rank_uses_a_hub_that_one_rank_cannot_reach(monkeypatch, caplog):
    connect_rank = HubLink.connect

    def connect_if_not_rank_two(self, *arguments):
        if self.rank == 2:
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        return connect_rank(self, *arguments)

    monkeypatch.setattr(HubLink, "connect", connect_if_not_rank_two)
    assert start_all(3, "127.0.0.1") == [None] * 3
    (message,) = caplog.messages
    assert message.startswith("No control plane: rank 2 (node 2) cannot reach 127.0.0.1:")
    assert "No route to host" in message
    assert "HierarchicalStrategy(health=Health(control_port=...))" in message


def test_a_name_that_does_not_resolve_leaves_all_ranks_without(caplog):
    assert start_all(2, "no.such.host.invalid") == [None] * 2
    assert "rank 1 (node 1) cannot reach no.such.host.invalid:" in caplog.text


def test_a_port_that_is_taken_leaves_all_ranks_without(caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert start_all(2, "127.0.0.1", port) == [None] * 2
    assert f"rank 0 (node 0) cannot listen on port {port}: [Errno {errno.EADDRINUSE}]" in caplog.text


@pytest.mark.parametrize("says", [b"SSH-2.0-OpenSSH_9.6\r\n", b'{"kind": "welcome"}\n', b""])
def test_a_port_with_another_service_is_not_joined(says):
    plane, calls = ControlPlane(1, 2, "rank 1 (node 1)"), queue.Queue()

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.sendall(says)
        connection.close()
        calls.put("answered")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        threads.submit(answer, listener)
        invitation = Invitation("127.0.0.1", listener.getsockname()[1], "token")
        with pytest.raises(OSError, match=r"server at this address is not|closed by the peer|reset by peer"):
            authenticate(connect(invitation, 5.0), invitation.token, 1, plane.place)
    assert not plane.is_connected
    assert not plane.should_stop()
