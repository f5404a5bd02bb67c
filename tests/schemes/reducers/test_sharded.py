"""A synchronization is refused when ranks come to it after different numbers of steps."""

from __future__ import annotations

import pytest
import torch
from harness import on_ranks, place

from lightning_hiercomm.comm.base import CommunicationError
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import ShardSpec
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes.reducers.sharded import ShardedAllReduce

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


def average(nodes, steps, *, numel=5, dtype=torch.float32, wire=None, bucket_bytes=8):
    """Average ``numel`` elements that all are the rank; returns every rank's result, or its error's message."""

    def work(topology):
        x = torch.full((numel,), float(topology.node), dtype=dtype, device=place.device)
        try:
            reducer = ShardedAllReduce(Replica([x], bucket_bytes=bucket_bytes), topology, wire)
            reducer(reducer.checked(steps[topology.rank]).round)
        except CommunicationError as error:
            return str(error), topology.meter.snapshot()
        return x.tolist(), topology.meter.snapshot()

    return on_ranks(work, nodes)


@pytest.mark.parametrize("step", [0, 1, 4095, 4096, 10**9 + 1])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_ranks_at_the_same_step_get_the_mean(step, count):
    results = average([[rank] for rank in range(count)], [step] * count)
    for values, _ in results:
        assert values == pytest.approx([(count - 1) / 2] * 5, rel=1e-6)


@pytest.mark.parametrize(
    ("nodes", "steps"),
    [
        ([[0], [1], [2]], [7, 7, 8]),
        ([[0], [1], [2]], [8, 7, 9]),
        ([[0], [1], [2]], [4095, 4096, 4096]),
        ([[0, 1], [2]], [7, 7, 8]),
        ([[0], [1, 2]], [0, 1, 1]),
        ([[0, 1], [2, 3]], [5, 5, 6, 6]),
    ],
    ids=str,
)
@pytest.mark.parametrize("wire", [None, Wire(torch.bfloat16)], ids=["fp32 wire", "bf16 wire"])
def test_unequal_numbers_of_steps_raise_on_all_ranks(nodes, steps, wire):
    messages = [values for values, _ in average(nodes, steps, wire=wire) if isinstance(values, str)]
    assert len(messages) == sum(map(len, nodes))
    for message in messages:
        assert "All ranks must take equally many steps" in message
        rank = int(message.split()[1])
        assert f"synchronizes after {steps[rank]} optimizer steps" in message


def test_the_preflight_of_an_exchange_is_one_message_of_24_bytes():
    (_, counters), *_ = average([[0], [1]], [3, 3], bucket_bytes=1024)
    assert counters["inter_messages"] == 1 + 1
    assert counters["inter_bytes"] == 24 + 5 * 4


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
        average(average.checked(3).round)
        return own.tolist(), everywhere.tolist(), statistics.tolist(), topology.meter.snapshot()["intra_bytes"]

    everyone = on_ranks(work, [[0, 1], [2, 3]], [1.0, 1.0, 3.0, 3.0])
    for rank, (own, everywhere, statistics, intra_bytes) in enumerate(everyone):
        assert own == [0.25 * (rank % 2) + 0.75 * (rank % 2 + 2)] * 3
        assert everywhere == [0.75] * 5
        assert statistics == [2.0] * 2  # (0 + 1) / 8 + 3 (2 + 3) / 8
        # half of the five (and one of padding) that both hold, for the statistics a half there and back, the preflight
        assert intra_bytes == 4 * 3 + 2 * 4 + 3 * 8
