"""Synchronization by the clock, by hand-computed numbers: nodes step from 0 towards 4 and 8, halfway each time."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import Rank, on_nodes, on_ranks

from lightning_hiercomm import DiLoCo, EverySeconds, ParameterSync, PeriodicAveraging
from lightning_hiercomm.schemes.pace import Pace

pytestmark = pytest.mark.usefixtures("device")

PLAIN_SUM = partial(torch.optim.SGD, lr=1.0)
"""An outer optimizer whose step is the mean."""

SCHEMES = [PeriodicAveraging(EverySeconds(3)), ParameterSync(EverySeconds(3)), DiLoCo(EverySeconds(3), PLAIN_SUM)]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def with_clock(rank: Rank) -> tuple[Pace, Clock]:
    """Give the rank a clock, and start its epoch."""
    pace, clock = rank.scheme.pace, Clock()  # type: ignore[attr-defined]
    pace.clock = clock
    rank.scheme.begin_epoch(0, dict)
    return pace, clock


def traces(scheme: Any, seconds: tuple[float, float], steps: tuple[int, int], nodes: Any = ((0,), (1,)), **chosen: Any):
    """Return the values of the first rank of every node after each step; steps take so many seconds, on 1 sample."""

    def work(rank: Rank) -> list[float]:
        _, clock = with_clock(rank)
        for _ in range(steps[rank.node]):
            clock.now += seconds[rank.node]
            rank.train_on(1)
        return [values[0] for values in rank.trace]

    chosen = {"targets": (4.0, 8.0), "dtype": torch.float64, "unequal_data": "weighted", **chosen}
    every = on_nodes(work, scheme, nodes, **chosen)
    return [every[ranks[0]] for ranks in nodes]


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_nodes_take_the_steps_that_fit_and_weigh_by_samples(scheme):
    first = (3 * 3.5 + 1 * 4) / 4  # 3.625
    ends = 4 - (4 - first) / 8, 8 - (8 - first) / 2
    second = (3 * ends[0] + ends[1]) / 4
    fast = [2, 3, first, 4 - (4 - first) / 2, 4 - (4 - first) / 4, second]
    assert traces(scheme, (1, 3), (6, 2)) == [fast, [first, second]]


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_normalized_mean_corrects_for_the_unequal_steps(scheme):
    # p = (3/4, 1/4), tau = (3, 1): the mean of tau, 5/2, times (3/4) 3.5/3 + (1/4) 4/1
    expected = 2.5 * (0.75 * 3.5 / 3 + 0.25 * 4)
    fast, slow = traces(scheme, (1, 3), (3, 1), unequal_data="normalized")
    assert fast == [2, 3, pytest.approx(expected)]
    assert slow == [pytest.approx(expected)]


def test_node_exchanges_after_the_step_in_which_its_time_is_over():
    assert traces(PeriodicAveraging(EverySeconds(3)), (2, 5), (2, 1)) == [
        [2, pytest.approx(10 / 3)],
        [pytest.approx(10 / 3)],
    ]


def test_fragments_follow_each_other_in_a_fixed_order():
    def work(rank: Rank) -> list[list[float]]:
        _, clock = with_clock(rank)
        for _ in range(4):
            clock.now += 1.0
            rank.train_on(1)
        return rank.trace

    scheme = DiLoCo(EverySeconds(2), PLAIN_SUM, fragments=2)  # one fragment every second
    first, second = on_nodes(
        work, scheme, targets=(4.0, 8.0), shapes=((1,), (1,)), dtype=torch.float64, unequal_data="weighted"
    )
    # after the first step fragment 0 is the mean of 2 and 4; after the second, fragment 1 that of 3 and 6
    assert first[:2] == [[3, 2], [3.5, 4.5]]
    assert second[:2] == [[3, 4], [5.5, 4.5]]
    assert first[2][0] == second[2][0] == (3.75 + 6.75) / 2
    assert first[3][1] == second[3][1]


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_node_without_batches_takes_part_with_weight_zero(scheme):
    def work(rank: Rank) -> tuple[list[float], list[bool], list[float]]:
        pace, clock = with_clock(rank)
        values, has_data, weights = [], [], []
        for exchange in range(3):
            clock.now += 3.0
            if rank.node == 0 and exchange < 2:
                pace.has_data = exchange < 1
                rank.train_on(1)
            elif exchange == 0:
                pace.has_data = False
                rank.train_on(1)
            else:
                rank.scheme.take_part()
            values.append(rank.values.item())
            has_data.append(pace.any_has_data)
            weights.append(pace.nodes[1].weight)
        return values, has_data, weights

    results = on_nodes(work, scheme, targets=(4.0, 8.0), dtype=torch.float64, unequal_data="weighted")
    # 3 is the mean of 2 and 4; node 0 steps from it to 3.5; in the last exchange no node has trained
    assert results == [([3, 3.5, 3.5], [True, False, False], [0.5, 0, 0.5])] * 2


def test_ranks_of_a_node_follow_the_clock_of_its_first_rank():
    def work(rank: Rank) -> int:
        pace, clock = with_clock(rank)
        for _ in range(4):
            clock.now += (2.0, 100.0, 2.0)[rank.rank]  # the second rank's would be over at each step
            rank.train_on(1)
        return pace.exchanges

    scheme = PeriodicAveraging(EverySeconds(3))
    assert on_nodes(work, scheme, ((0, 1), (2,)), targets=(4.0, 4.0, 8.0), unequal_data="weighted") == [2, 2, 2]


def test_without_other_nodes_there_is_no_exchange():
    def work(rank: Rank) -> tuple[object, float]:
        rank.train_on(1)
        return rank.scheme.pace, rank.values.item()  # type: ignore[attr-defined]

    scheme = PeriodicAveraging(EverySeconds(3))
    assert on_nodes(work, scheme, ((0, 1),), targets=(4.0, 4.0), unequal_data="weighted") == [(None, 2.0)] * 2


def test_the_node_that_waits_least_is_waited_for():
    def work(topology: Any) -> tuple[Any, ...]:
        clock = Clock()
        pace = Pace(topology, torch.device("cpu"), EverySeconds(1), clock)
        for _ in range(3):
            pace.count(2 + topology.rank)
            pace.count_step()
            reports = pace.report()
            everyone = topology.world.all_gather_object(reports)
            clock.now += (4.0, 1.0, 3.0)[topology.node]  # rank 1 arrives last
            pace.receive([*zip(*everyone, strict=True)])
            pace.end_exchange()
        nodes = [(node.steps, node.samples, node.waited, node.delayed) for node in pace.nodes]
        assert pace.scalars()["node1/samples"] == nodes[1][1]
        assert len(pace.lines()) == 4
        return pace.waited_for, nodes

    expected = (1, [(3, 6.0, 8.0, 0), (3, 9.0, 2.0, 2), (3, 12.0, 6.0, 0)])
    assert on_ranks(work, ((0,), (1,), (2,))) == [expected] * 3


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: EverySeconds(0), "seconds=0 must be a positive number"),
        (lambda: EverySeconds(-1.5), "seconds=-1.5 must be"),
        (lambda: EverySeconds(float("inf")), "seconds=inf must be finite"),
        (lambda: PeriodicAveraging(EverySeconds(1), at_epoch_end=False), "at_epoch_end=False"),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_scheme_by_the_clock_needs_counts_of_samples():
    with pytest.raises(ValueError, match=r"EverySeconds\(seconds=1\).* use it with HierarchicalStrategy"):
        on_nodes(lambda rank: None, PeriodicAveraging(EverySeconds(1)))
