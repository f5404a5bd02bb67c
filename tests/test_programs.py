"""Random programs are right, or end with a clear error in time; see :mod:`programs`."""

from __future__ import annotations

import pytest
from pairwise import on_push
from programs import HANG_TIMEOUT, PATIENCE, Action, Program, check, drawn

BATCH, FIRST = 2, 540_000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.long("two programs; those whose ranks wait for each other wait for hang_timeout")
@pytest.mark.parametrize("first", on_push(range(FIRST, FIRST + 120, BATCH), FIRST))
def test_random_programs_are_right_or_end_with_a_clear_error(first):
    failures = [f"{n}: {error!r}\n{drawn(n)}" for n in range(first, first + BATCH) if (error := _failure(drawn(n)))]
    assert not failures, "python -m tools.programs --only N\n" + "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        Program("2x1", "all_reduce", (Action("log", "on_train_epoch_start", 0, (1,)),)),
        Program("2x1", "all_reduce", (Action("loop", "on_train_epoch_end", 0, (0,)),)),
        Program("2x1", "periodic", (Action("reduce", "on_train_end", 0, (0,)),)),
        Program("1x2", "periodic", (Action("twice", "training_step", 2, (1,)),), is_manual=True),
    ],
    ids=lambda program: program.actions[0].name,
)
def test_an_action_of_one_rank_ends_with_its_name(program):
    error = _failure(program)
    assert error is None, repr(error)


def _failure(program: Program) -> AssertionError | None:
    """Try it twice, because a program may be late on a busy machine."""
    error = None
    for factor in (1.0, 4.0):
        try:
            return check(program, factor * HANG_TIMEOUT, factor * PATIENCE)
        except AssertionError as again:
            error = again
    return error
