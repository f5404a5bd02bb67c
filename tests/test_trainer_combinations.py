"""What a Trainer is given, at random: see :mod:`trainer_combinations`, which draws hundreds by hand."""

from __future__ import annotations

from typing import Any

import pytest
from pairwise import on_push
from trainer_combinations import Fit, check, drawn, ranks

BATCH = 5


@pytest.fixture(scope="module", autouse=True)
def ranks_that_stay_for_the_next_fit():
    yield
    ranks.close()


@pytest.mark.long("five fits, and a calculation of its own for each")
@pytest.mark.parametrize("first", on_push(range(0, 100, BATCH), 0))
def test_random_fits_equal_an_independent_calculation(first):
    for number in range(first, first + BATCH):
        try:
            check(drawn(number))
        except Exception as error:
            error.add_note(f"python -m tools.trainer_combinations --only {number}\n{drawn(number)}")
            raise


PERIODIC = {"sync_every": 4, "at_epoch_end": True, "order": "after_step"}


@pytest.mark.parametrize("how", [{"accumulate": 2}, {"manual": True}], ids=["accumulated", "manual"])
def test_gradients_after_an_unfreeze_follow_the_synchronized_set(how):
    check(Fit("periodic", PERIODIC, "1+1", unfreeze=2, **how))


DILOCO = {"sync_every": 3, "outer_optimizer": "nesterov", "fragments": 1, "staleness": 0, "keep_local": 0.0}
LONG: dict[str, Any] = {"optimizer": "adam", "steps": 3, "epochs": 4}


@pytest.mark.parametrize(
    "fit",
    [
        Fit("periodic", PERIODIC, "2x2", warmup=6, wire="int4", resume=3, **LONG),
        Fit("periodic", PERIODIC, "2x2", warmup=6, wire="int4", resume=5, **LONG),
        Fit("diloco", DILOCO, "2x2", warmup=0.5, resume=7, **LONG),
        Fit("periodic", PERIODIC, "4 of 1", warmup=4, accumulate=2, steps=4),
    ],
    ids=["resumed in it", "resumed at its end", "resumed after it", "accumulated"],
)
def test_a_synchronous_phase_equals_the_calculation(fit):
    check(fit)


OF_SCHEMES = {
    "all_reduce": {},
    "periodic": PERIODIC,
    "steps_delay": {"delay": 2, "warmup_steps": 2, "local_update": "glu"},
    "gossip": {"graph": "full", "fragments": 2, "overlap": False, "push_sum": True},
    "diloco": {"sync_every": 4, "outer_optimizer": "adam", "fragments": 2, "staleness": 1, "keep_local": 0.5},
}
LOOKS = {"validate": ("batches", 3), "saves": ("last",), "after": ("save", "validate")}


@pytest.mark.parametrize("scheme", on_push(OF_SCHEMES, "periodic", "steps_delay", "gossip", "diloco"))
def test_validations_and_files_hold_the_averaged_model(scheme):
    check(Fit(scheme, OF_SCHEMES[scheme], "1+1", module=("teacher",), **LOOKS))


@pytest.mark.parametrize("scheme", on_push(OF_SCHEMES, "gossip"))
def test_a_default_checkpoint_callback_saves_the_final_model(scheme):
    check(Fit(scheme, OF_SCHEMES[scheme], "1+1", saves=("default",)))


@pytest.mark.parametrize("module", on_push(["assigns", "batchnorm", "clamp", "mask", "reborn", "tied"], "tied"))
def test_unusual_modules_train_and_are_saved_like_any_other(module):
    check(Fit("periodic", PERIODIC, "2x2", module=(module,), **LOOKS))


def test_weights_that_a_callback_swaps_for_validation_train_on_as_they_were():
    check(Fit("periodic", PERIODIC, "2x2", averages="swap", **LOOKS))
