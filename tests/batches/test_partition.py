"""How a global batch is divided, and what the parts weigh."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hiercomm.batches.partition import StepCost, divide, rank_weights, relative_speeds


def at_speeds(*speeds):
    return [StepCost(0.0, speed) for speed in speeds]


@pytest.mark.parametrize(
    ("speeds", "total", "expected"),
    [
        ((1, 1, 1, 3), 10, [2, 2, 1, 5]),
        ((1, 1, 1, 1), 10, [3, 3, 2, 2]),
        ((4, 3, 1, 1), 32, [14, 11, 4, 3]),
        ((1, 100), 16, [1, 15]),
        ((4, 2, 1), 128, [73, 37, 18]),
    ],
)
def test_the_largest_remainders_are_rounded_up(speeds, total, expected):
    assert divide(total, at_speeds(*speeds)) == expected


def test_step_times_of_1_2_and_4_seconds_are_speeds_4_2_and_1():
    assert relative_speeds([1 / seconds for seconds in (1, 2, 4)]) == [4, 2, 1]


@pytest.mark.parametrize(("weighting", "expected"), [("samples", 1.7109375), ("speed", 12 / 7), ("none", 7 / 3)])
def test_gradients_1_2_and_4_combine_as_in_the_table(weighting, expected):
    weights = rank_weights(weighting, [73, 37, 18], [4, 2, 1])
    combined = sum(weight * gradient for weight, gradient in zip(weights, (1, 2, 4), strict=True))
    assert combined == pytest.approx(expected, abs=1e-15)


speeds = st.floats(1e-3, 1e3)
costs = st.lists(st.builds(StepCost, st.floats(0, 10), speeds), min_size=1, max_size=8)


@given(costs, st.integers(0, 200), st.integers(1, 4))
def test_parts_sum_to_the_whole_and_none_is_smaller_than_the_least_if_possible(costs, extra, least):
    total = len(costs) + extra
    sizes = divide(total, costs, least)
    assert sum(sizes) == total
    assert min(sizes) >= (least if total >= least * len(costs) else 1)
    alone = divide(total, costs)
    if min(alone) >= least:
        assert sizes == alone


def test_who_is_slow_gets_the_least_and_the_others_share_the_rest():
    assert divide(32, at_speeds(4, 3, 0.1)) == [18, 13, 1]
    assert divide(32, at_speeds(4, 3, 0.1), least=2) == [17, 13, 2]
    assert divide(5, at_speeds(4, 3, 0.1), least=2) == [2, 2, 1]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(0, 200))
def test_without_bounds_every_part_is_its_quota_rounded_up_or_down(speeds, extra):
    total = sum(speeds) + extra  # every quota is at least 1
    for size, speed in zip(divide(total, at_speeds(*speeds)), speeds, strict=True):
        assert abs(size - Fraction(total * speed, sum(speeds))) < 1


@given(st.lists(st.builds(StepCost, st.floats(0, 3), st.floats(0.1, 10)), min_size=2, max_size=3), st.integers(3, 12))
def test_no_other_division_would_finish_sooner_by_more_than_a_sample(costs, total):
    def slowest(sizes):
        return max(cost.seconds(size) for cost, size in zip(costs, sizes, strict=True))

    best = min(slowest(sizes) for sizes in product(range(1, total), repeat=len(costs)) if sum(sizes) == total)
    assert slowest(divide(total, costs)) <= best + max(1 / cost.speed for cost in costs) + 1e-9


def test_a_fixed_cost_counts():
    # 10 ms + 1 ms a sample, and 1 ms a sample: both take 30 ms
    assert divide(50, [StepCost(0.010, 1000), StepCost(0.0, 1000)]) == [20, 30]


def test_fewer_samples_than_ranks_are_refused():
    with pytest.raises(ValueError, match="global_batch_size=2 is less than one sample for each of the 3 ranks"):
        divide(2, at_speeds(1, 1, 1))
