"""What a Trainer is given, at random: see :mod:`trainer_combinations`, which draws hundreds by hand."""

from __future__ import annotations

import pytest
from trainer_combinations import Fit, check, drawn, ranks

BATCH = 5
ON_PUSH = 5


@pytest.fixture(scope="module", autouse=True)
def ranks_that_stay_for_the_next_fit():
    yield
    ranks.close()


@pytest.mark.long("five fits, and a calculation of its own for each")
@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=[pytest.mark.nightly] * (n >= ON_PUSH)) for n in range(0, 100, BATCH)]
)
def test_random_fits_equal_an_independent_calculation(first):
    for number in range(first, first + BATCH):
        try:
            check(drawn(number))
        except Exception as error:
            error.add_note(f"python -m tools.trainer_combinations --only {number}\n{drawn(number)}")
            raise


PERIODIC = (("sync_every", 4), ("at_epoch_end", True), ("order", "after_step"))


@pytest.mark.parametrize("how", [{"accumulate": 2}, {"manual": True}], ids=["accumulated", "manual"])
def test_gradients_after_an_unfreeze_follow_the_synchronized_set(how):
    check(Fit("periodic", PERIODIC, "1+1", unfreeze=2, **how))
