"""What steps cost, before training and during it."""

from __future__ import annotations

import pytest
import torch

from lightning_hiercomm.batches.speed import StepClock, fit_cost
from lightning_hiercomm.comm.meter import Meter


def costs(fixed, speed):
    return (pytest.approx(fixed), pytest.approx(speed))


@pytest.mark.parametrize(
    ("seconds", "fixed", "speed"),
    [({8: 0.026, 32: 0.074}, 0.010, 500), ({8: 0.016}, 0.0, 500), ({10: 0.01, 30: 0.05}, 0.0, 20 / 0.03)],
    ids=["two sizes show the fixed cost", "one size shows a speed only", "a fixed cost is never negative"],
)
def test_step_times_by_size_give_the_cost_of_a_step(seconds, fixed, speed):
    cost = fit_cost(seconds)
    assert (cost.fixed, cost.speed) == costs(fixed, speed)


def test_time_that_does_not_grow_promises_no_boundless_speed():
    cost = fit_cost({8: 0.020, 32: 0.019})
    assert cost.seconds(200) > 1.2 * cost.seconds(20)


def test_the_spread_is_that_of_the_middle_half(clock):
    watch = StepClock(Meter(), torch.device("cpu"))
    for seconds in (0.009, 0.010, 0.011, 0.5, 0.010):  # one block in which something else happened
        watch.start()
        clock.advance(seconds)
        watch.stop()
        watch.end_block()
    assert (watch.seconds, watch.spread) == costs(0.010, 0.05)


def test_the_clock_of_training_leaves_waiting_out_and_counts_loading(clock):
    meter, device = Meter(), torch.device("cpu")
    watch = StepClock(meter, device)
    assert watch.seconds is None
    for _ in range(50):
        watch.load()
        clock.advance(0.002)
        watch.start()
        clock.advance(0.010)
        with meter.waiting("intra", device):
            clock.advance(0.500)
        watch.stop()
        clock.advance(0.300)  # logging, progress bars: the same on every rank, and no part of a step
    assert watch.seconds == pytest.approx(0.012)


def test_a_block_that_validation_cuts_short_counts(clock):
    watch = StepClock(Meter(), torch.device("cpu"))
    watch.start()
    clock.advance(0.01)
    watch.stop()
    watch.end_block()
    clock.advance(5)
    assert watch.seconds == pytest.approx(0.01)
    watch.reset()
    assert watch.seconds is None
