"""The control plane, its ranks being threads of this process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from subprocess import PIPE

import pytest

from lightning_hiercomm import hub
from lightning_hiercomm.control import ControlPlane, Invitation, RankFailure


class Star:
    """Some ranks' planes, joined."""

    def __init__(self) -> None:
        self.planes: list[ControlPlane] = []
        self.invitation: Invitation

    def __call__(self, size: int) -> list[ControlPlane]:
        # `grace` is long: a rank that is not ended by its failure would take the test process with it
        self.planes = [ControlPlane(rank, size, f"rank {rank} (node 0)", grace=60.0) for rank in range(size)]
        self.invitation = self.planes[0].invite("127.0.0.1")
        assert all(plane.join(self.invitation) for plane in self.planes)
        return self.planes

    def stranger(self, **hello: object) -> socket.socket:
        """A connection that nobody's plane owns."""
        connection = socket.create_connection(("127.0.0.1", self.invitation.port), timeout=5.0)
        hub.send(connection, {"kind": "hello", "token": self.invitation.token, **hello})
        return connection


@pytest.fixture
def star() -> Iterator[Star]:
    star = Star()
    yield star
    for plane in reversed(star.planes):
        plane.close()


def test_a_failure_reaches_every_rank_by_name(star):
    planes = star(3)
    planes[1].report_failure(ValueError("boom"))
    for plane in (planes[0], planes[2]):
        assert plane.wait_for_failure(5.0) == "rank 1 (node 0) failed: ValueError: boom"
        with pytest.raises(RankFailure, match=r"rank 1 \(node 0\) failed"):
            plane.should_stop()


def test_only_the_first_failure_counts(star):
    planes = star(3)
    planes[1].report_failure(ValueError("the cause"))
    assert planes[2].wait_for_failure(5.0)
    planes[2].report_failure(RuntimeError("a consequence"))
    assert planes[0].wait_for_failure(5.0) == "rank 1 (node 0) failed: ValueError: the cause"


def test_a_connection_that_breaks_is_a_death(star, capfd):
    planes = star(2)
    with star.stranger(rank=9, place="rank 9 (node 4)"):
        time.sleep(0.3)
    assert planes[1].wait_for_failure(5.0) == "rank 9 (node 4) died"
    # the hub says so itself, because a launcher may end everybody else at once
    assert capfd.readouterr().err == "lightning_hiercomm: rank 9 (node 4) died\n"


def test_the_hub_outlives_rank_zero_and_names_only_the_first_to_die(capfd):
    hub_process = subprocess.Popen([sys.executable, hub.__file__, "3"], stdin=PIPE, stdout=PIPE, text=True)
    assert hub_process.stdin is not None
    assert hub_process.stdout is not None
    hub_process.stdin.write("secret\n")
    hub_process.stdin.flush()
    port = int(hub_process.stdout.readline())
    ranks = [socket.create_connection(("127.0.0.1", port), timeout=5.0) for _ in range(3)]
    for rank, connection in enumerate(ranks):
        hub.send(connection, {"kind": "hello", "token": "secret", "rank": rank, "place": f"rank {rank}"})
    time.sleep(0.2)
    hub_process.send_signal(signal.SIGTERM)  # a scheduler sends it to everybody; the ranks end in their own time
    hub_process.stdin.close()
    ranks[0].close()
    assert json.loads(ranks[2].recv(1000)) == {"kind": "failed", "message": "rank 0 died"}
    ranks[1].close()
    time.sleep(0.2)
    assert hub_process.poll() is None
    ranks[2].close()
    assert hub_process.wait(5.0) == 0
    hub_process.stdout.close()
    assert capfd.readouterr().err == "lightning_hiercomm: rank 0 died\n"


def test_who_does_not_know_the_token_is_ignored(star):
    planes = star(2)
    with star.stranger(token="guess", rank=1, place="rank 1") as stranger:
        assert stranger.recv(100) == b""
    assert planes[1].wait_for_failure(0.3) is None


def test_leaving_is_no_failure(star):
    planes = star(3)
    planes[2].close()
    planes[0].close()
    assert planes[1].wait_for_failure(0.5) is None


@pytest.mark.parametrize("asking", [0, 1, 2])
def test_all_ranks_stop_at_one_batch_however_far_apart_they_are(star, asking):
    planes = star(3)
    for plane, batches in zip(planes, (3, 10, 6), strict=True):
        assert not any(plane.should_stop() for _ in range(batches))
    planes[asking].request_stop()
    deadline = time.monotonic() + 5
    while not all(plane.stop_requested for plane in planes):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stopped_at = []
    for plane, batches in zip(planes, (3, 10, 6), strict=True):
        while not plane.should_stop():
            batches += 1
            assert batches < 50
        stopped_at.append(batches + 1)
    assert stopped_at == [11, 11, 11]


def test_a_rank_without_a_way_to_rank_zero_goes_on_with_a_warning(caplog):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    plane = ControlPlane(1, 2, "rank 1 (node 1)")
    assert not plane.join(Invitation("127.0.0.1", port, "token"))
    assert "rank 1 (node 1) cannot reach the control plane" in caplog.text
    assert not plane.is_connected
    assert not plane.should_stop()
