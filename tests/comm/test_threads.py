"""Ranks that are threads: where they run."""

from __future__ import annotations

import os

import pytest

from lightning_hiercomm.comm.threads import ThreadWorld

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="there is nothing to choose from"
)


def test_ranks_share_a_processor_and_leave_the_others_to_who_started_them():
    allowed = os.sched_getaffinity(0)
    own = ThreadWorld(3).run(lambda rank, world: os.sched_getaffinity(0))
    assert own[0] == own[1] == own[2] < allowed
    assert len(own[0]) == 1
    assert os.sched_getaffinity(0) == allowed


def test_ranks_of_large_models_may_run_side_by_side():
    allowed = os.sched_getaffinity(0)
    assert ThreadWorld(2, one_processor=False).run(lambda rank, world: os.sched_getaffinity(0)) == [allowed, allowed]
