"""A lane keeps the order of its jobs, and whoever waits for one hears of its error."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from lightning_hiercomm.comm.base import Handle
from lightning_hiercomm.comm.lane import Lane
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld

CPU = torch.device("cpu")


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def lane(meter: Meter) -> Iterator[Lane]:
    lane = Lane(CPU, meter)
    yield lane
    lane.close()


def test_jobs_run_one_after_another_in_the_order_they_were_submitted(lane):
    done: list[int] = []
    handles = [lane.submit(lambda i=i: done.append(i)) for i in range(100)]
    handles[-1].wait()
    assert done == list(range(100))
    assert all(handle.is_done() for handle in handles)


def test_submitting_does_not_wait_for_the_job(lane):
    may_end = threading.Event()
    handle = lane.submit(may_end.wait)
    assert not handle.is_done()
    may_end.set()
    handle.wait()
    handle.wait()
    assert handle.is_done()


def test_an_error_reaches_every_waiter_and_the_lane_goes_on(lane):
    def fail() -> None:
        raise ValueError("lost")

    handle, after = lane.submit(fail), lane.submit(lambda: None)
    for _ in range(2):
        with pytest.raises(ValueError, match="lost"):
            handle.wait()
    with pytest.raises(ValueError, match="lost"):
        handle.future(torch.zeros(1)).wait()
    after.wait()


def test_a_future_completes_with_its_job_whenever_it_was_asked_for(lane):
    may_end, value = threading.Event(), torch.zeros(1)

    def work() -> None:
        may_end.wait()
        value.fill_(3)

    handle = lane.submit(work)
    early = handle.future(value)
    assert not early.done()
    may_end.set()
    assert early.wait().item() == 3
    assert handle.future(value).wait() is value


def test_only_waiting_for_a_job_is_exposed_not_the_job(lane, meter):
    def work() -> None:
        with meter.waiting("inter", CPU):
            pass

    handle = lane.submit(work)
    while not handle.is_done():
        pass
    assert meter.seconds == {}
    handle.wait()
    assert meter.seconds["inter"] > 0


def test_closing_ends_the_thread_after_what_was_submitted_and_a_lane_may_be_used_again(meter):
    done: list[int] = []
    lane = Lane(CPU, meter, "closing")
    lane.close()  # nothing was ever submitted
    for i in range(3):
        lane.submit(lambda i=i: done.append(i))
    lane.close()
    assert done == [0, 1, 2]
    assert not any(thread.name == "hiercomm-closing" for thread in threading.enumerate())
    lane.submit(lambda: done.append(3)).wait()
    assert done == [0, 1, 2, 3]
    lane.close()


def test_lanes_of_several_ranks_match_their_moves_up():
    def work(rank: int, world: ThreadWorld) -> list[float]:
        meter = Meter()
        group = world.connect(rank, meter)([range(world.size)], "inter")
        lane = Lane(CPU, meter)
        tensors = [torch.full((3,), float(rank + i)) for i in range(10)]

        def double_sum(tensor: torch.Tensor) -> None:
            group.all_reduce(tensor).wait()
            group.all_reduce(tensor).wait()

        handles: list[Handle] = [lane.submit(lambda tensor=tensor: double_sum(tensor)) for tensor in tensors]
        handles[-1].wait()
        lane.close()
        return [tensor[0].item() for tensor in tensors]

    expected = [4.0 * (6 + 4 * i) for i in range(10)]
    assert ThreadWorld(4).run(work) == [expected] * 4
