"""QuadraticAveraging, against numbers worked by hand."""

from __future__ import annotations

import pytest
from harness import Rank, on_nodes

from lightning_hiercomm.schemes.quadratic import QuadraticAveraging

TABLE = [(0, 4), (3, 3), (2.25, 4.25), (1.6875, 5.1875), (1.265625, 5.890625), (3.68359375, 3.68359375)]


def train(rank: Rank, steps: int) -> list[list[float]]:
    for _ in range(steps):
        rank.optimizer.param_groups[0]["lr"] = 0.5 if rank.scheme.state.steps < 2 else 0.25
        rank.train()
    return rank.trace


def test_a_round_is_longer_when_the_learning_rate_has_fallen():
    traces = on_nodes(lambda rank: train(rank, 6), QuadraticAveraging(2, growth=0.5), targets=(0.0, 8.0))
    for node, trace in enumerate(traces):
        assert trace == [[values[node]] for values in TABLE]


def test_rounds_that_begin_in_warm_up_do_not_grow():
    counted = on_nodes(
        lambda rank: train(rank, 6) and rank.scheme.state.synchronizations, QuadraticAveraging(2, 0.5, 5)
    )
    assert counted == [3, 3]


@pytest.mark.parametrize("after", range(1, 6))
def test_a_resumed_run_goes_on_in_the_round_it_was_in(after):
    def first(rank: Rank) -> dict:
        train(rank, after)
        return rank.state()

    def second(rank: Rank) -> list[list[float]]:
        rank.load(saved[rank.rank])
        return train(rank, 6 - after)

    saved = on_nodes(first, QuadraticAveraging(2, growth=0.5), targets=(0.0, 8.0))
    resumed = on_nodes(second, QuadraticAveraging(2, growth=0.5), targets=(0.0, 8.0))
    for node, trace in enumerate(resumed):
        assert trace == [[values[node]] for values in TABLE[after:]]


def test_a_round_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="=0 must be a positive number"):
        QuadraticAveraging(0)
