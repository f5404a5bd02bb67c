"""Lanes between the nodes of a meeting, over gloo."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.staged import StagedCommunicator
from lightning_hiercomm.elastic.lanes import GlooLinks
from lightning_hiercomm.elastic.meeting import Meeting, Member


def meeting_of_two() -> tuple[TCPStore, Meeting]:
    """With the store at which its members find each other."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    members = (Member(name, life=name, run="run", ranks=1, store=f"127.0.0.1:{store.port}") for name in "ab")
    return store, Meeting(tuple(members))


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_lane_sums_and_takes_the_way_over_the_host_where_there_are_gpus(has_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    _store, meeting = meeting_of_two()

    def member(index: int) -> tuple[list[float], int, bool]:
        meter, values = Meter(), torch.arange(3.0) * (index + 1)
        lane = GlooLinks("127.0.0.1", dead_after=20.0).lane(meeting, index, 0, meter)
        lane.all_reduce(values).wait()
        lane.close()
        return values.tolist(), meter.snapshot()["inter_bytes"], isinstance(lane, StagedCommunicator)

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(member, range(2))] == [([0.0, 3.0, 6.0], 12, has_gpu)] * 2


def test_a_member_that_is_not_there_is_missed_before_the_lane_is_made():
    _store, meeting = meeting_of_two()
    with pytest.raises(RuntimeError):
        GlooLinks("127.0.0.1", dead_after=1.0).lane(meeting, 0, 0, Meter())
