"""What a Trainer is given, at random: see :mod:`trainer_combinations`, which draws hundreds by hand."""

from __future__ import annotations

import pytest
from trainer_combinations import check, drawn

BATCH = 5


@pytest.mark.parametrize("first", range(0, 30, BATCH))
def test_random_fits_are_what_an_independent_calculation_gives(first):
    for number in range(first, first + BATCH):
        try:
            check(drawn(number))
        except Exception as error:
            error.add_note(f"python -m tests.trainer_combinations --only {number}\n{drawn(number)}")
            raise
