"""Batches that nodes claim from a common counter."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from harness import on_ranks
from problems import Stream
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hiercomm.batches.claims import Claims, claimed_dataloader, is_divided


def claimed(samples: int, nodes: Any, epochs: int = 1, slow: tuple[int, ...] = (), **loader: Any) -> Any:
    """Return the batches that every rank loads in each epoch."""

    def work(topology: Any) -> list[list[list[int]]]:
        claims = Claims(topology, "127.0.0.1")
        given = DataLoader(torch.arange(samples), **loader)
        own = claimed_dataloader(given, claims, topology, seed=7)
        loaded: list[list[list[int]]] = []
        for epoch in range(epochs):
            own.batch_sampler.go_to(epoch)  # type: ignore[union-attr]
            loaded.append([])
            for batch in own:
                loaded[-1].append(batch.tolist())
                if topology.rank in slow:
                    time.sleep(0.02)
        topology.world.all_gather_object(None)  # rank 0 has the store
        return loaded

    return on_ranks(work, nodes)


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_batch_is_used_once_and_fast_nodes_take_more(shuffle):
    ranks = claimed(100, ((0,), (1,)), epochs=2, slow=(1,), batch_size=2, shuffle=shuffle)
    for epoch in (0, 1):
        first, second = (rank[epoch] for rank in ranks)
        assert sorted(sum(first + second, [])) == list(range(100))  # noqa: RUF017
        assert len(first) > len(second) > 0
    assert (ranks[1][0][0] != ranks[1][1][0]) == shuffle


def test_ranks_of_a_node_take_equally_many_batches():
    (zero, one, two), batches = ([rank[0] for rank in claimed(26, ((0, 1), (2,)), batch_size=2)], 13)
    assert len(zero) == len(one)
    assert zero[0], one[0] == ([0, 1], [2, 3])
    assert two[0] == [4, 5]
    used = [batch[0] // 2 for batch in [*zero, *one, *two]]
    assert set(used) == set(range(batches))
    assert len(used) <= batches + 1  # the last rank of the node may repeat the first batch


def test_epoch_shorter_than_the_ranks_repeats_its_batches():
    assert [rank[0] for rank in claimed(3, ((0,), (1,), (2,)), batch_size=2)] == [[[0, 1]], [[2]], [[0, 1]]]


def test_last_short_batch_can_be_left_out():
    ranks = claimed(7, ((0,), (1,)), batch_size=2, drop_last=True)
    assert sorted(sum((batch for rank in ranks for batch in rank[0]), [])) == list(range(6))  # noqa: RUF017


def test_only_data_that_lightning_would_divide_is_claimed():
    numbers = torch.arange(4)
    assert is_divided(DataLoader(numbers, shuffle=True))
    assert not is_divided(DataLoader(Stream([])))
    assert not is_divided(DataLoader(numbers, sampler=DistributedSampler(numbers, 2, 0)))
    assert not is_divided([numbers])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": None}, "batch_size=None makes none"),
        ({"batch_sampler": [[0], [1]]}, "cannot claim batches of a list"),
    ],
)
def test_batches_that_cannot_be_divided_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        claimed_dataloader(DataLoader(torch.zeros(4), **arguments), None, None, 0)  # type: ignore[arg-type]


def test_dataset_smaller_than_a_batch_is_refused():
    with pytest.raises(ValueError, match="has 1 samples, less than a batch of 2"):
        claimed(1, ((0,), (1,)), batch_size=2, drop_last=True)
