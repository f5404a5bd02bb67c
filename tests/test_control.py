"""The control plane, its ranks being threads of this process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from lightning_hiercomm.control import ControlPlane, Invitation, RankFailure


@pytest.fixture
def star() -> Iterator[Callable[[int], list[ControlPlane]]]:
    """Makes the planes of some ranks, joined; closes them afterwards."""
    planes: list[ControlPlane] = []

    def make(size: int) -> list[ControlPlane]:
        # `grace` is long: a rank that is not ended by its failure would take the test process with it
        planes.extend(ControlPlane(rank, size, f"rank {rank} (node 0)", grace=60.0) for rank in range(size))
        invitation = planes[0].invite("127.0.0.1")
        assert all(plane.join(invitation) for plane in planes)
        return planes

    yield make
    for plane in reversed(planes):
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


def test_a_connection_that_breaks_is_a_death(star):
    planes = star(2)
    with socket.create_connection(("127.0.0.1", planes[0]._hub.port)) as stranger:
        token = planes[0]._hub.token
        stranger.sendall(f'{{"kind": "hello", "token": "{token}", "rank": 9, "place": "rank 9 (node 4)"}}\n'.encode())
        time.sleep(0.3)
    assert planes[1].wait_for_failure(5.0) == "rank 9 (node 4) died"


def test_who_does_not_know_the_token_is_ignored(star):
    planes = star(2)
    with socket.create_connection(("127.0.0.1", planes[0]._hub.port)) as stranger:
        stranger.sendall(b'{"kind": "hello", "token": "guess", "rank": 1, "place": "rank 1"}\n')
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
