"""Measured links."""

from __future__ import annotations

import pytest
import torch

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.planning import network
from lightning_hiercomm.planning.network import measured


def on_threads(nodes):
    def body(rank, world):
        meter = Meter()
        return measured(Topology(nodes, rank, world.connect(rank, meter), meter), torch.device("cpu"))

    return ThreadWorld(sum(map(len, nodes))).run(body)


@pytest.mark.parametrize("nodes", [[[0], [1]], [[0, 1], [2, 3]], [[0, 1], [2]]])
def test_rate_and_latency_follow_from_times_of_an_all_reduce(nodes, monkeypatch):
    shards = min(map(len, nodes))

    def seconds(topology, tensor, repeats=5):
        return 2 * (topology.num_nodes - 1) * 0.001 + topology.num_shards * 4 * tensor.numel() / 1e8

    monkeypatch.setattr(network, "_seconds", seconds)
    for rate, latency in on_threads(nodes):
        assert rate == pytest.approx(1e8, rel=1e-3)  # two nodes send each other what they have, over all ranks
        assert latency == pytest.approx(0.001 + shards * 8 / 1e8 / 2, rel=1e-3)


def test_all_ranks_measure_the_same():
    first, second = on_threads([[0], [1]])
    assert first == second
    assert first[0] > 0
