"""The cost of collectives on a link, by the alpha-beta model."""

from __future__ import annotations

import pytest

from benchmarks.predict.cluster import Link, rounds_of

MODEL = 1e6


@pytest.mark.parametrize(
    ("move", "members", "ring", "halving"),
    [
        ("all_reduce", 1, 0, 0),
        ("all_reduce", 2, 2, 2),
        ("all_reduce", 8, 14, 6),
        ("all_reduce", 5, 8, 6),
        ("reduce_scatter", 8, 7, 3),
        ("all_gather", 8, 7, 3),
        ("broadcast", 8, 3, 3),
        ("exchange", 8, 1, 1),
    ],
)
def test_rounds(move, members, ring, halving):
    assert (rounds_of(move, members, "ring"), rounds_of(move, members, "halving")) == (ring, halving)


def test_a_collective_costs_bytes_and_rounds():
    cost = Link(bandwidth=1e9, latency=1e-3, algorithm="ring").cost("all_reduce", 4, MODEL)
    assert cost.bytes == 1.5e6
    assert cost.seconds == pytest.approx(1.5e-3)
    assert cost.delay == pytest.approx(6e-3)


def test_ranks_of_a_node_share_its_link():
    link = Link(bandwidth=1e9)
    assert link.cost("exchange", 2, MODEL, sharing=4).seconds == pytest.approx(4e-3)
    assert link.cost("exchange", 2, MODEL, sharing=1).seconds == pytest.approx(1e-3)


def test_a_group_of_one_sends_nothing():
    assert Link(1e9, 1e-3).cost("all_reduce", 1, MODEL).seconds == 0
