"""What a run costs before its first step: counted, so that no clock has a say."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from benchmarks import startup
from benchmarks.startup import DDP
from lightning_hiercomm.comm import torch as over_torch

pytestmark = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.8"), reason="this torch always connects all pairs"
)


@pytest.mark.long("starts up to ten ranks twice")
def test_store_keys_and_connections_do_not_grow_with_the_world(monkeypatch):
    monkeypatch.setattr(over_torch, "_MOST_DIRECT_PEERS", 1)  # inter-node groups are large from two ranks on
    few, many = startup.measure(6, 2), startup.measure(10, 2)
    for start in (few, many):
        assert start.keys["rendezvous"] == 8 * (start.ranks - 1) + 1
        keys = {phase: start.keys[phase] / start.ranks for phase in ("topology", "duplicate", "synchronization")}
        assert keys == {"topology": 8, "duplicate": 8, "synchronization": 0}
        assert start.keys[DDP] / start.ranks == 2 * start.ranks + 1  # torch's own group needs the square
        assert start.keys["group"] == start.keys[DDP]
    assert many.extra_open_files == few.extra_open_files  # a ring has two neighbors
    assert many.open_files[DDP] - few.open_files[DDP] == 4


@pytest.mark.nightly
@pytest.mark.long("starts up to twelve ranks twice")
def test_store_keys_and_connections_do_not_grow_beyond_a_full_mesh(monkeypatch):
    monkeypatch.setattr(over_torch, "_MOST_DIRECT_PEERS", 1)
    monkeypatch.setattr(startup, "MOST_IN_MESH", 5)
    few, many = startup.measure(6, 2), startup.measure(12, 2)
    assert [start.keys["group"] / start.ranks for start in (few, many)] == [1, 1]
    assert max(start.keys["topology"] / start.ranks for start in (few, many)) <= 8 + 4  # a tree's edges
    assert few.keys[DDP] / few.ranks == 2 * few.ranks + 1  # DDP always makes a mesh
    assert (
        many.open_files["synchronization"] - few.open_files["synchronization"] <= 2
    )  # one more power of two to talk to


def test_small_process_groups_start_fully_connected():
    start = startup.measure(6, 1)
    assert start.keys["synchronization"] == 0
    assert start.open_files["synchronization"] == start.open_files["duplicate"]
