"""Everything that goes together, at random: see :mod:`combinations`, which draws thousands by hand."""

from __future__ import annotations

import pytest
from combinations import check, drawn

BATCH = 20


@pytest.mark.parametrize("first", range(0, 200, BATCH))
def test_random_combinations_are_what_an_independent_calculation_gives(first):
    for number in range(first, first + BATCH):
        try:
            check(drawn(number))
        except Exception as error:
            error.add_note(f"python -m tests.combinations --only {number}\n{drawn(number)}")
            raise
