"""What a run costs before its first step: counted, so that no clock has a say."""

from __future__ import annotations

import multiprocessing

import pytest

pytest.importorskip("benchmarks")

from benchmarks import crowd, startup
from benchmarks.startup import DDP
from lightning_hiercomm.comm import torch as over_torch
from lightning_hiercomm.control import open_files


@pytest.mark.long("starts up to ten ranks twice")
def test_store_keys_and_connections_do_not_grow_with_the_world(monkeypatch):
    monkeypatch.setattr(over_torch, "_MOST_DIRECT_PEERS", 1)  # lanes are large from two ranks on
    few, many = startup.measure(6, 2), startup.measure(10, 2)
    for start in (few, many):
        assert start.words["meeting"] == 7 * start.ranks
        words = {phase: start.words[phase] / start.ranks for phase in ("topology", "twin", "agreements")}
        assert words == {"topology": 8, "twin": 8, "agreements": 0}
        assert start.words[DDP] / start.ranks == 2 * start.ranks + 1  # torch's own group needs the square
        assert start.words["group"] == start.words[DDP]
    assert many.handles_beyond == few.handles_beyond  # a lane's ring has two neighbours
    assert many.handles[DDP] - few.handles[DDP] == 4


@pytest.mark.long("starts up to twelve ranks twice")
def test_store_keys_and_connections_do_not_grow_beyond_a_full_mesh(monkeypatch):
    monkeypatch.setattr(over_torch, "_MOST_DIRECT_PEERS", 1)
    monkeypatch.setattr(open_files, "_MOST_IN_MESH", 5)
    few, many = startup.measure(6, 2), startup.measure(12, 2)
    assert [start.words["group"] / start.ranks for start in (few, many)] == [1, 1]
    assert max(start.words["topology"] / start.ranks for start in (few, many)) <= 8 + 4  # a tree's edges
    assert few.words[DDP] / few.ranks == 2 * few.ranks + 1  # whose ranks are in a mesh all the same
    assert many.handles["agreements"] - few.handles["agreements"] <= 2  # one more power of two to talk to


def test_small_process_groups_start_fully_connected():
    start = startup.measure(6, 1)
    assert start.words["agreements"] == 0
    assert start.handles["agreements"] == start.handles["twin"]


def test_a_rank_that_fails_is_named_and_none_is_left(monkeypatch):
    def fail(rank, *_):
        if rank == 1:
            raise ValueError("no luck")

    monkeypatch.setattr(startup, "_start", fail)
    before = multiprocessing.active_children()  # ranks that stay for other tests
    with pytest.raises(RuntimeError, match="rank 1: ValueError: no luck"):
        startup.measure(3, 1)
    monkeypatch.setattr(startup, "_start", lambda *_: startup.time.sleep(60))
    with pytest.raises(RuntimeError, match="2 of 2 ranks are not done in time"):
        startup.measure(2, 1, timeout=1.0)
    assert set(multiprocessing.active_children()) <= set(before)


def test_a_hub_serves_hundreds_of_ranks_that_one_process_plays():
    played = crowd.measure(200, seconds=0.2)
    assert played.ranks == 200
    assert min(played.joined_seconds, played.failure_seconds, played.megabytes, played.watched_seconds) > 0
