"""Weights by samples, against numbers worked by hand: nodes step from 0 towards 4 and 8, halfway each time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import Rank, on_nodes, on_ranks, place

from lightning_hiercomm import AllReduce, DiLoCo, ParameterSync, PeriodicAveraging
from lightning_hiercomm.schemes.preflight import launch
from lightning_hiercomm.schemes.samples import SampleWeights

pytestmark = pytest.mark.usefixtures("device")

PLAIN_SUM = partial(torch.optim.SGD, lr=1.0)
"""An outer optimizer whose step is the mean."""

SCHEMES = [PeriodicAveraging(2), ParameterSync(2), ParameterSync(2, reducer="leader"), DiLoCo(2, PLAIN_SUM)]


def weighed(topology, *counts):
    """Return the round of ranks that have counted samples."""
    return launch(topology, 3, torch.zeros((), dtype=torch.int64, device=place.device), counts=counts).round


def traces(scheme, samples, nodes=((0,), (1,)), **chosen):
    """Return the values of the first rank of every node after each step; ``samples[node][step]`` are trained on."""

    def work(rank: Rank) -> list[float]:
        for own in samples[rank.node]:
            rank.train_on(own)
        return [values[0] for values in rank.trace]

    chosen = {"targets": (4.0, 8.0), "dtype": torch.float64, "unequal_data": True, **chosen}
    every = on_nodes(work, scheme, nodes, **chosen)
    return [every[ranks[0]] for ranks in nodes]


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_nodes_weigh_by_samples_since_last_synchronization(scheme):
    # (2 * 3 + 6 * 6) / 8 = 5.25, then each node has trained on 2 samples: (4.3125 + 7.3125) / 2
    expected = [[2, 5.25, 4.625, 5.8125], [4, 5.25, 6.625, 5.8125]]
    assert traces(scheme, [[1, 1, 1, 1], [3, 3, 1, 1]]) == expected


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_node_without_batches_takes_the_others_mean(scheme):
    # 2 batches of 1 sample against 2 of 3, and then only node 0 has batches
    expected = [[2, 5.25, 4.625, 4.3125], [4, 5.25, 5.25, 4.3125]]
    assert traces(scheme, [[1, 1, 1, 1], [3, 3, 0, 0]]) == expected


def test_each_fragment_weighs_by_samples_since_its_own_synchronization():
    def work(rank: Rank) -> list[list[float]]:
        for own in ([1, 1, 1], [1, 0, 0])[rank.node]:
            rank.train_on(own)
        return rank.trace

    scheme = DiLoCo(2, PLAIN_SUM, fragments=2)
    result = on_nodes(work, scheme, targets=(4.0, 8.0), shapes=((1,), (1,)), dtype=torch.float64, unequal_data=True)
    third = pytest.approx(10 / 3)  # node 0 has trained on two samples since the start, node 1 on one
    assert result[0][:2] == [[3, 2], [3.5, third]]
    assert result[1][:2] == [[3, 4], [3, third]]
    assert [trace[2][0] for trace in result] == [3.75, 3.75]  # only node 0 has trained since the first step


def test_averaged_model_leaves_out_a_node_without_samples():
    def work(rank: Rank) -> float:
        for own in ([1, 1, 1], [1, 1, 0])[rank.node]:
            rank.train_on(own)
        rank.averaged()
        return rank.averaged().item()  # evaluating again gives the same

    # the mean after two steps is 4.5, from which node 0 alone steps to 4.25
    assert on_nodes(work, PeriodicAveraging(2), targets=(4.0, 8.0), unequal_data=True) == [4.25, 4.25]


def test_all_reduce_averages_gradients_over_samples():
    def work(rank: Rank) -> list[list[float]]:
        for samples in ([1.0, 3.0], [2.0, 0.0]):
            rank.gradients.round = weighed(rank.topology, samples[rank.node])
            rank.train(None if samples[rank.node] else 0.0)
        return rank.trace

    # 0.5 * (1/4 * 4 + 3/4 * 8) = 3.5, and then the gradient is that of node 0 alone
    result = on_nodes(work, AllReduce(), targets=(4.0, 8.0), unequal_data=True)
    assert result == [[[3.5], [3.75]]] * 2


@pytest.mark.parametrize("scheme", [PeriodicAveraging(3), DiLoCo(3), DiLoCo(4, fragments=2), AllReduce()], ids=repr)
@pytest.mark.parametrize("wire", [None, "bfloat16", "int4"])
def test_equal_samples_keep_all_bits(scheme, wire):
    def work(rank: Rank) -> list[list[float]]:
        for _ in range(7):
            if rank.scheme.samples is not None:
                rank.train_on(7)
            else:
                rank.train()
        rank.scheme.finish()
        return [*rank.trace, rank.values.tolist()]

    chosen = {"nodes": ((0,), (1, 2), (3, 4)), "targets": None, "shapes": ((5, 3), (7,)), "wire": wire, "epochs": 1}
    assert on_nodes(work, scheme, **chosen) == on_nodes(work, scheme, **chosen, unequal_data=True)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_encoded_averages_stay_near_the_unencoded_ones(wire):
    samples = [[2, 2, 2, 2, 2, 2], [1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    chosen = {"targets": (4.0, 8.0, 16.0), "dtype": torch.float32, "nodes": ((0,), (1,), (2,))}
    exact, encoded = (traces(PeriodicAveraging(2), samples, wire=each, **chosen) for each in (None, wire))
    assert [trace[-1] for trace in encoded] == [pytest.approx(exact[0][-1], rel=0.02)] * 3


def test_resumed_run_continues_with_its_samples():
    def work(rank: Rank) -> list[float]:
        for own in ([1, 1, 2], [1, 1, 6])[rank.node]:
            rank.train_on(own)
        state = rank.state()
        rank.train_on(2)
        whole = rank.values.item()
        rank.load(state)
        rank.train_on(2)
        return [whole, rank.values.item()]

    for whole, resumed in on_nodes(work, PeriodicAveraging(2), targets=(4.0, 8.0), unequal_data=True):
        assert whole == resumed


def test_without_any_samples_the_topology_weighs():
    def work(topology):
        samples = SampleWeights()
        samples.count(3.0 if topology.rank else 0.0)
        first = weighed(topology, samples.since())
        samples.end()
        return first.weights, weighed(topology, samples.since()).weights

    assert on_ranks(work, ((0,), (1,)), weights=(1.0, 3.0)) == [((0.0, 1.0), (0.25, 0.75))] * 2


def test_weights_of_gradients_in_a_node_do_not_follow_samples():
    def work(topology):
        round_ = weighed(topology, [0.0, 0.0, 1.0, 5.0][topology.rank])
        return topology.weight_in_node, round_.of_nodes[topology.node]

    results = on_ranks(work, ((0, 1), (2, 3)))
    assert [in_node for in_node, _ in results] == [0.5] * 4
    assert [of_node for _, of_node in results] == [0.0, 0.0, 1.0, 1.0]
