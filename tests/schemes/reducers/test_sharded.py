"""The sharded all-reduce: its messages, and shards of parameters. Its means are in test_calculations.py."""

from __future__ import annotations

import pytest
import torch
from harness import on_ranks, place

from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import ShardSpec
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes.reducers.sharded import ShardedAllReduce

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


def test_the_preflight_of_an_exchange_is_one_message_of_24_bytes():
    def work(topology):
        reducer = ShardedAllReduce(Replica([torch.zeros(5, device=place.device)]), topology)
        reducer(reducer.begin(3).round)
        return topology.meter.snapshot()

    for counters in on_ranks(work, [[0], [1]]):
        assert (counters["inter_messages"], counters["inter_bytes"]) == (1 + 1, 24 + 5 * 4)


@pytest.mark.parametrize("wire", [None, Wire(torch.bfloat16)], ids=["fp32 wire", "bf16 wire"])
def test_shards_are_averaged_with_the_same_shards_of_other_nodes(wire):
    def work(topology):
        rank = topology.rank
        own, everywhere, statistics = (torch.zeros(numel, device=place.device) for numel in (3, 5, 2))
        shares = {id(own): ShardSpec("rank", 6, 3 * (rank % 2))}
        average = ShardedAllReduce(Replica([own, everywhere], [statistics], shares=shares), topology, wire)
        own += rank
        everywhere += rank // 2
        statistics += rank
        average(average.begin(3).round)
        return own.tolist(), everywhere.tolist(), statistics.tolist(), topology.meter.snapshot()["intra_bytes"]

    everyone = on_ranks(work, [[0, 1], [2, 3]], [1.0, 1.0, 3.0, 3.0])
    for rank, (own, everywhere, statistics, intra_bytes) in enumerate(everyone):
        assert own == [0.25 * (rank % 2) + 0.75 * (rank % 2 + 2)] * 3
        assert everywhere == [0.75] * 5
        assert statistics == [2.0] * 2  # (0 + 1) / 8 + 3 (2 + 3) / 8
        # half of the five (and one of padding) that both hold, for the statistics a half there and back, the preflight
        assert intra_bytes == 4 * 3 + 2 * 4 + 3 * 8
