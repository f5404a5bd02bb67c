"""What steps cost, before training and during it."""

from __future__ import annotations

import pytest
import torch

from lightning_hiercomm.batches.partition import StepCost
from lightning_hiercomm.batches.speed import StepClock, StepTime, fit_cost, time_step
from lightning_hiercomm.comm.meter import Meter


def costs(fixed, speed):
    return (pytest.approx(fixed), pytest.approx(speed))


def test_two_sizes_show_the_fixed_cost():
    cost = fit_cost({8: 0.026, 32: 0.074})
    assert (cost.fixed, cost.speed) == costs(0.010, 500)


def test_one_size_shows_a_speed_only():
    assert fit_cost({8: 0.016}) == StepCost(0.0, 500)


def test_a_fixed_cost_is_never_negative():
    cost = fit_cost({10: 0.01, 30: 0.05})
    assert (cost.fixed, cost.speed) == costs(0.0, 20 / 0.03)


def test_time_that_does_not_grow_promises_no_boundless_speed():
    cost = fit_cost({8: 0.020, 32: 0.019})
    assert cost.seconds(200) > 1.2 * cost.seconds(20)


class Quota:
    """So much processor time in every period of 100 ms of a rank's clock, as Linux's control groups give it."""

    def __init__(self, clock, share):
        self.clock, self.share = clock, share
        self.period, self.left = -1, 0.0

    def work(self, seconds):
        while seconds > 1e-9:
            period = int(self.clock.now / 0.1 + 1e-6)
            if period == self.period and self.left < 1e-9:
                self.clock.advance((period + 1) * 0.1 - self.clock.now)
                period += 1
            if period != self.period:
                self.period, self.left = period, 0.1 * self.share
            done = min(seconds, self.left)
            seconds, self.left = seconds - done, self.left - done
            self.clock.advance(done)


@pytest.mark.parametrize("worked", [0.0, 0.007, 0.008, 0.020])
def test_a_quota_that_stops_a_process_now_and_then_counts_on_average(clock, worked):
    # 10 ms of work in every period of 100 ms, in steps of 1 ms: the median step takes 1 ms, the average one 10 ms, and
    # the first that is timed 1 ms or 91
    quota = Quota(clock, 0.1)
    quota.work(worked)
    time = time_step(lambda: quota.work(0.001), lambda value: [value], lambda: None)
    assert time.seconds == pytest.approx(0.010, rel=0.1)


@pytest.mark.parametrize("seconds", [0.001, 0.007, 0.020])
def test_the_quota_that_a_rank_saves_while_it_waits_for_others_does_not_count(clock, seconds):
    quota = Quota(clock, 0.5)

    def gather(value):
        clock.advance(0.1)
        return [value]

    time = time_step(lambda: quota.work(seconds), gather, lambda: None)
    assert time.seconds == pytest.approx(2 * seconds, rel=0.1)


def test_the_spread_is_that_of_the_middle_half():
    time = StepTime.of([0.009, 0.010, 0.011, 0.5, 0.010])  # one block in which something else happened
    assert (time.seconds, time.spread) == costs(0.010, 0.05)
    assert StepTime.of([0.02] * 3).spread == 0


def test_all_ranks_take_equally_many_steps_whatever_their_speed(clock):
    from lightning_hiercomm.comm.threads import ThreadWorld

    def work(rank, world):
        group, steps = world.connect(rank)([range(world.size)], "world"), [0]

        def step():
            steps[0] += 1
            clock.advance((rank + 1) * 0.003)

        return time_step(step, group.all_gather_object, lambda: None).seconds, steps[0]

    seconds, steps = zip(*ThreadWorld(3).run(work), strict=True)
    assert seconds == (pytest.approx(0.003), pytest.approx(0.006), pytest.approx(0.009))
    assert len(set(steps)) == 1


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


def test_the_clock_follows_a_rank_that_slows_down(clock):
    watch = StepClock(Meter(), torch.device("cpu"), window=5)

    def train(steps, seconds):
        for _ in range(steps):
            watch.start()
            clock.advance(seconds)
            watch.stop()

    train(100, 0.01)
    assert watch.seconds == pytest.approx(0.01)
    train(30, 0.04)
    assert watch.seconds == pytest.approx(0.04)


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
