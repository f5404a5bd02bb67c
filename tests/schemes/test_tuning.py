"""sync_every="auto", with a clock that goes on when the tests say so."""

from __future__ import annotations

import itertools
import logging
import math
from functools import partial

import pytest
import torch
from harness import on_nodes, reloaded

from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.schemes import DASO, DiLoCo, PeriodicAveraging
from lightning_hiercomm.schemes.daso import RunningDASO
from lightning_hiercomm.schemes.diloco import RunningDiLoCo
from lightning_hiercomm.schemes.periodic import RunningPeriodicAveraging
from lightning_hiercomm.schemes.tuning import AutoPeriod, PeriodTuner

RUNNING = {DASO: RunningDASO, DiLoCo: RunningDiLoCo, PeriodicAveraging: RunningPeriodicAveraging}


class Clock:
    """Shows what the test has added."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timed(kind, *, step=1.0, first=0.0, wait=0.0, launch=0.0, merge=0.0):
    """The scheme, on ranks whose clocks go on by these seconds; numbers, or functions of the rank and of the count."""

    class Timed(kind):
        def build(self, context):
            return Running(self, context)

    class Running(RUNNING[kind]):
        def __init__(self, config, context):
            super().__init__(config, context)
            self.clock, self.counts, self.synchronized_after = Clock(), itertools.count(), []
            if self.tuner is not None:
                self.tuner.clock = self.clock
            self.exchanger.run = partial(self.timed_exchange, self.exchanger.run)
            self.exchanger.overlap = partial(self.timed_overlap, self.exchanger.overlap)

        def spend(self, seconds):
            self.clock.now += seconds(self.topology.rank, next(self.counts)) if callable(seconds) else seconds

        def step(self, run, last=False):
            def timed_run():
                self.spend(step)
                if self.state.steps == 0:
                    self.spend(first)
                return run()

            return super().step(timed_run, last)

        def timed_exchange(self, exchange, fragments):
            self.spend(wait)
            self.synchronized_after.append(self.state.steps)
            exchange(fragments)

        def timed_overlap(self, overlap, arrived, leaving, staleness):
            self.spend(merge if arrived is not None else 0.0)
            self.spend(launch if leaving else 0.0)
            if arrived is not None:
                self.synchronized_after.append(self.state.steps)
            overlap(arrived, leaving, staleness)

    Timed.__name__ = Timed.__qualname__ = kind.__name__
    return Timed


def cycling(**arguments):
    return {"sync_every": "auto", "warmup_epochs": 0, "cooldown_epochs": 0, **arguments}


def train(scheme, steps, epochs=None, **training):
    def work(rank):
        rank.scheme.begin_run(epochs, None)
        for _ in range(steps):
            rank.train()
        return rank.scheme

    return on_nodes(work, scheme, **training)


WITH_A_SLOWER_RANK = {
    "step": lambda rank, count: 4.0 if rank else 2.0,
    "wait": lambda rank, count: 1.0 if rank else 1.0 + 4 * 2.0,  # the first rank is four steps ahead of the second
}
WITH_OUTLIERS = {
    "step": lambda rank, count: 50.0 if count in (3, 8) else 1.0,
    "first": 70.0,
    "wait": lambda rank, count: 99.0 if count < 6 else 1.0,
}


@pytest.mark.parametrize(
    ("kind", "seconds", "arguments", "steps", "period"),
    [
        # 3.7 / (0.05 * 74 steps of 1 s) is 1; with 73 it is more
        pytest.param(PeriodicAveraging, {"wait": 3.7}, {}, 22, 74, id="the least that keeps to the target"),
        *(
            pytest.param(PeriodicAveraging, {"wait": period / 10}, {"overhead_target": 0.1}, 22, period, id="exact")
            for period in (5, 10, 50)
        ),
        pytest.param(PeriodicAveraging, {"wait": 0.0}, {}, 22, 1, id="free exchanges"),
        # 1 / (0.05 * 4)
        pytest.param(PeriodicAveraging, WITH_A_SLOWER_RANK, {}, 22, 5, id="waits for a slower rank do not count"),
        pytest.param(PeriodicAveraging, WITH_OUTLIERS, {}, 22, 20, id="slow steps and first exchanges do not count"),
        pytest.param(PeriodicAveraging, {"wait": 1.0}, {"order": "before_step"}, 22, 20, id="before the step"),
        pytest.param(DASO, {"merge": 0.01}, cycling(staleness=3), 40, 3, id="no less than the staleness"),
        pytest.param(
            DASO, {"wait": 30.0, "merge": 1.0}, cycling(warmup_epochs=1, warmup_steps=9), 9 + 22, 20, id="when cycling"
        ),
    ],
)
def test_the_period_is_chosen_that_keeps_to_the_target(kind, seconds, arguments, steps, period):
    schemes = train(timed(kind, **seconds)(**{"sync_every": "auto", **arguments}), steps)
    assert [scheme.period for scheme in schemes] == [period] * 2
    assert all(scheme.tuner is None for scheme in schemes)


def test_nodes_sync_often_during_tuning_and_then_at_the_chosen_period():
    scheme, _ = train(timed(PeriodicAveraging, wait=0.45)("auto"), 40)
    assert (scheme.period, scheme.synchronized_after) == (9, [4, 8, 12, 16, 20, 27, 36])


def test_epoch_ends_count_for_schedules_that_sync_there():
    def work(rank):
        for epoch in range(8):
            if epoch:
                rank.scheme.begin_epoch(epoch, dict)
            for _ in range(2):
                rank.train()
            rank.scheme.end_epoch(None)
            rank.scheme.clock.now += 1000.0  # validation
        return rank.scheme.period

    assert on_nodes(work, timed(PeriodicAveraging, wait=1.0)("auto")) == [20, 20]


def test_daso_times_launches_and_merges_only():
    scheme, _ = train(timed(DASO, launch=0.2, merge=0.3)(**cycling(staleness=2)), 24)
    assert (scheme.period, scheme.state.tuned_period, scheme.staleness) == (10, 10, 2)


def test_daso_that_waits_chooses_in_its_warm_up():
    scheme, _ = train(timed(DASO, wait=1.0)(**cycling(staleness=0, warmup_steps=9)), 9)
    assert (scheme.period, scheme.phase) == (20, "warm-up")


def test_daso_halves_and_restores_the_tuned_period():
    def work(rank):
        scheme = rank.scheme
        for _ in range(24):
            rank.train()
        seen = [scheme.period]
        for _ in range(6):
            scheme.end_epoch(torch.tensor(1.0))
            scheme.begin_epoch(1, dict)
            seen.append(scheme.period)
        return seen

    assert on_nodes(work, timed(DASO, merge=0.2)(**cycling(patience=0)))[0] == [4, 4, 2, 1, 4, 2, 1]


def test_diloco_counts_all_fragments_of_a_period():
    arguments, shapes = {"sync_every": "auto", "fragments": 2, "staleness": 1}, ((2,), (2,))
    scheme, _ = train(timed(DiLoCo, launch=0.1, merge=0.15)(**arguments), 40, shapes=shapes)
    assert scheme.period == 10  # 2 * 0.25 / 0.05
    short, _ = train(timed(DiLoCo)(**arguments), 40, shapes=shapes)
    assert short.period == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: timed(PeriodicAveraging, wait=0.25)("auto"),
        lambda: timed(DASO, merge=0.25)(**cycling()),
        lambda: timed(DiLoCo, wait=0.25)("auto"),
    ],
    ids=["periodic", "daso", "diloco"],
)
def test_the_chosen_period_is_saved_and_kept_on_resume(make):
    def work(rank):
        for _ in range(30):
            rank.train()
        chosen, state, schedule = rank.scheme.period, rank.state(), reloaded(rank.scheme.state_dict(shared=True))
        for _ in range(12):
            rank.train()
        return chosen, state, schedule, rank.values, rank.scheme.synchronized_after[-2:]

    before = on_nodes(work, make())

    def resumed(rank):
        chosen, state, schedule, values, averaged = before[rank.rank]
        rank.load(state)
        assert (rank.scheme.period, rank.scheme.tuner) == (5, None)
        for _ in range(12):
            rank.train()
        assert rank.scheme.synchronized_after[-2:] == averaged
        torch.testing.assert_close(rank.values, values, rtol=0, atol=0)
        rank.scheme.load_state_dict(schedule)
        return chosen, rank.scheme.period

    assert on_nodes(resumed, make()) == [(5, 5)] * 2


def test_a_run_that_ends_before_the_choice_tunes_again_on_resume():
    def work(rank):
        for _ in range(6):
            rank.train()
        return rank.state()

    states = on_nodes(work, timed(PeriodicAveraging, wait=1.0)("auto"))

    def resumed(rank):
        rank.load(states[rank.rank])
        assert rank.scheme.tuner is not None
        for _ in range(22):
            rank.train()
        return rank.scheme.period

    assert on_nodes(resumed, timed(PeriodicAveraging, wait=1.0)("auto")) == [20, 20]


def test_a_number_is_kept_whatever_a_checkpoint_has_chosen():
    def work(rank):
        for _ in range(22):
            rank.train()
        return rank.scheme.state_dict(shared=True)

    schedule = on_nodes(work, timed(PeriodicAveraging, wait=1.0)("auto"))[0]

    def resumed(rank):
        rank.scheme.load_state_dict(schedule)
        return rank.scheme.period

    assert on_nodes(resumed, PeriodicAveraging(7)) == [7, 7]


@pytest.mark.parametrize(
    ("given", "expected"), [((8, 2), (4, 1)), ((4, 0), (4, 0)), ((8, 4), (8, 4))], ids=["the same", "others", "a later"]
)
def test_daso_resumes_its_halved_period_unless_arguments_changed(given, expected):
    def saved(rank):
        rank.scheme.state.cycle = [4, 1]
        return rank.scheme.state_dict(shared=True)

    def daso(sync_every, staleness):
        return DASO(sync_every, staleness, warmup_epochs=0, cooldown_epochs=0)

    schedule = on_nodes(saved, daso(8, 2))[0]

    def resumed(rank):
        rank.scheme.load_state_dict(schedule)
        return rank.scheme.period, rank.scheme.staleness

    assert on_nodes(resumed, daso(*given)) == [expected] * 2


def test_chosen_period_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, "lightning_hiercomm"):
        train(timed(PeriodicAveraging, wait=1.0)("auto"), 22)
    assert [record.getMessage() for record in caplog.records] == [
        "PeriodicAveraging: sync_every=20: a step takes 1e+03 ms, and training waits 1e+03 ms for the exchanges of a"
        " period, which is 5.0 % of it"
    ]


def test_a_run_shorter_than_the_tuning_warns(caplog):
    def work(rank):
        rank.train()
        rank.scheme.finish()

    with caplog.at_level(logging.WARNING, "lightning_hiercomm"):
        on_nodes(work, PeriodicAveraging("auto"))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "the run ended before sync_every='auto' had timed 5 exchanges, so the period was 4 to the end" in said


def test_on_one_node_there_is_nothing_to_choose():
    def work(rank):
        rank.scheme.begin_run(None, 3)
        for _ in range(30):
            rank.train()
        rank.scheme.finish()
        return rank.scheme.tuner is None

    assert on_nodes(work, PeriodicAveraging("auto"), nodes=[[0, 1]]) == [False] * 2


@pytest.mark.parametrize("kind", [PeriodicAveraging, DASO, DiLoCo])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sync_every": "often"}, "sync_every='often' must be a positive number of optimizer steps, or 'auto'"),
        ({"sync_every": "auto", "overhead_target": 0.0}, "overhead_target=0.0 must be a positive fraction"),
        ({"sync_every": "auto", "overhead_target": math.nan}, "overhead_target=nan must be"),
        ({"sync_every": 8, "overhead_target": 0.1}, "overhead_target=0.1 is for sync_every='auto'"),
    ],
)
def test_bad_arguments_are_named(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


def test_a_run_that_is_too_short_to_choose_is_refused():
    with pytest.raises(ValueError, match="for the first 22 optimizer steps, but the run ends after 21"):
        on_nodes(lambda rank: rank.scheme.begin_run(None, 21), PeriodicAveraging("auto"))
    on_nodes(lambda rank: rank.scheme.begin_run(None, 22), PeriodicAveraging("auto"))


def test_epochs_into_which_no_exchange_fits_are_refused():
    with pytest.raises(ValueError, match="4 optimizer steps apart, but an epoch has 3"):
        list(PeriodicAveraging("auto", at_epoch_end=False).check_run(2, 3, 99))
    with pytest.raises(ValueError, match="5 optimizer steps apart, but an epoch has 4"):
        list(DASO("auto", staleness=2).check_run(2, 4, 99))
    list(PeriodicAveraging("auto").check_run(2, 1, 99))
    list(DiLoCo("auto").check_run(2, 1, 99))
    list(DASO(4).check_run(2, 1, 99))


def test_all_ranks_choose_the_same_whatever_they_saw():
    def work(rank, world):
        clock = Clock()
        tuner = PeriodTuner(AutoPeriod(0.05, 1), clock=clock)
        while not tuner.end_step():
            clock.now += 1.0 + 0.1 * rank
            with tuner.exchanging(starts=True, ends=True):
                clock.now += 1.0 - 0.2 * rank
        return tuner.choose(world.connect(rank)([range(3)], "world"))

    choices = ThreadWorld(3).run(work)
    assert len(set(choices)) == 1
    assert (choices[0].period, choices[0].step_seconds) == (10, pytest.approx(1.2))
    assert choices[0].exchange_seconds == pytest.approx(0.6)
    assert choices[0].overhead == pytest.approx(0.05)
