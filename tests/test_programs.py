"""Programs of other people, at random: see :mod:`programs`, which draws hundreds by hand."""

from __future__ import annotations

import pytest
from programs import (
    PATIENCE,
    drawn,
    judge,
    ranks,
)
from programs_toy import Action, Program

BATCH, ON_PUSH = 8, 8
FIRST = 540_000


@pytest.fixture(scope="module", autouse=True)
def ranks_that_stay_for_the_next_program():
    yield
    ranks.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.long("eight programs; those whose ranks wait for each other wait for hang_timeout")
@pytest.mark.parametrize(
    "first",
    [pytest.param(FIRST + n, marks=[pytest.mark.nightly] * (n >= ON_PUSH)) for n in range(0, 240, BATCH)],
)
def test_random_programs_are_right_or_end_with_a_clear_error(first):
    failures = [f"{n}: {error!r}\n{drawn(n)}" for n in range(first, first + BATCH) if (error := _trouble(drawn(n)))]
    assert not failures, "python -m tools.programs --only N\n" + "\n".join(failures)


@pytest.mark.parametrize(
    "action",
    [
        Action("log", "on_train_epoch_start", 0, (1,)),
        Action("loop", "on_save_checkpoint", 0, (0,)),
        Action("reduce", "on_validation_epoch_end", 0, (0,)),
    ],
    ids=lambda action: action.name,
)
def test_a_program_that_once_failed_ends_with_a_clear_report(action):
    error = _trouble(Program("2x1", "all_reduce", (action,)))
    assert error is None, repr(error)


def _trouble(program: Program) -> AssertionError | None:
    """Try it twice: on a busy machine a program may be late, or a rank be taken for frozen."""
    error = None
    for hang_timeout, patience in ((3.0, PATIENCE), (15.0, 30.0)):
        try:
            return judge(program, ranks.outcomes(program, hang_timeout, patience), patience)
        except AssertionError as again:
            error = again
    return error


UNEQUAL_RANKS = [
    Program("2x1", "daso", (Action("none", "training_step", 1, (1,)),), "manual"),
    Program("3x1", "diloco", (Action("none", "training_step", 2, (1,)),), "manual"),
    Program("1x2", "periodic", (Action("twice", "training_step", 2, (1,)),), "manual"),
    Program("2x1", "periodic", (Action("reduce", "on_train_end", 0, (0,)),)),
]


@pytest.mark.slow
@pytest.mark.parametrize("program", UNEQUAL_RANKS, ids=lambda p: f"{p.actions[0].name}-{p.layout}-{p.scheme}")
def test_a_step_or_collective_on_one_rank_only_ends_with_its_name(program):
    error = _trouble(program)
    assert error is None, error
