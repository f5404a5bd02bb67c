"""Plateau, against losses judged by hand."""

from __future__ import annotations

import math

from lightning_hiercomm.schemes.plateau import Plateau, PlateauDetector


def verdicts(losses, **arguments):
    plateau = PlateauDetector(Plateau(**arguments))
    return [plateau.reached(loss) for loss in losses]


def test_plateau_fires_at_the_third_value_without_improvement():
    assert verdicts([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == [False, False, False, True, False, False, True]


def test_a_fall_by_the_threshold_is_no_improvement_and_a_fall_by_more_is():
    # against the best so far, 8: 5 % below is 7.6
    assert verdicts([8.0, 7.6], patience=0) == [False, True]
    assert verdicts([8.0, 7.59], patience=0) == [False, False]


def test_slow_progress_adds_up_until_it_counts():
    # 4 % a step: every second value is more than 5 % below the best, so no two in a row fail
    assert verdicts([0.96**n for n in range(20)], patience=1) == [False] * 20


def test_an_improvement_resets_the_count():
    assert verdicts([1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5]) == [False] * 6 + [True]


def test_a_negative_loss_must_fall_too():
    assert verdicts([-1.0, -1.02, -1.1, -1.0], patience=0) == [False, True, False, True]


def test_a_loss_that_is_not_a_number_never_becomes_the_best():
    plateau = PlateauDetector(Plateau(patience=1))
    assert [plateau.reached(loss) for loss in (math.nan, math.inf, 3.0, math.nan, math.nan)] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert plateau.best == 3.0
