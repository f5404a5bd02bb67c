"""Programs of other people, at random: see :mod:`programs`, which draws hundreds by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from programs import (
    PATIENCE,
    Death,
    Hang,
    Outcome,
    Refusal,
    Unexplained,
    WrongAnswer,
    drawn,
    goes_together,
    judge,
    ranks,
)
from programs_toy import ACTIONS, Action, Program

BATCH, ON_PUSH = 8, 16
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


WRITES_IN_SAVES = [
    Program(layout, scheme, (Action("save", *save, ranks), Action("clamp", "on_save_checkpoint", 0, ranks)), *more)
    for layout, scheme, save, ranks, *more in [
        ("2x2", "daso", ("on_train_batch_end", 4), (0, 1, 2, 3), "automatic", "adam"),
        ("2+1", "steps_delay, warm-up", ("on_before_optimizer_step", 0), (0, 1, 2), "manual"),
    ]
]


@pytest.mark.slow
@pytest.mark.parametrize("program", WRITES_IN_SAVES, ids=lambda program: program.scheme)
def test_schemes_keep_values_clamped_while_saving(program):
    error = _trouble(program)
    assert error is None, error


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


PLAIN = Program("2x1", "periodic", (Action("lr", "on_train_batch_end", 1, (0, 1)),))
RAISES = replace(PLAIN, actions=(Action("raise", "training_step", 2, (1,)),))


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return ranks.outcomes(PLAIN, hang_timeout=60.0)


def test_a_program_that_is_right_passes(outcomes):
    judge(PLAIN, outcomes)


def _other_value_at_a_hook(outcome: Outcome) -> Outcome:
    event = outcome.events[9]
    events = [*outcome.events[:9], event._replace(values=[1 + event.values[0], *event.values[1:]])]
    return replace(outcome, events=[*events, *outcome.events[10:]])


TAMPERED: dict[str, tuple[type[AssertionError], Callable[[Outcome], Outcome]]] = {
    "late": (Hang, lambda outcome: replace(outcome, late=6.0)),
    "hang": (Hang, lambda outcome: replace(outcome, how="hangs")),
    "signal": (Death, lambda outcome: replace(outcome, how="SIGABRT")),
    "error": (Death, lambda outcome: replace(outcome, how="error")),
    "end": (WrongAnswer, lambda outcome: replace(outcome, state={**outcome.state, "weight": torch.zeros(3)})),
    "value": (WrongAnswer, _other_value_at_a_hook),
    "hook": (WrongAnswer, lambda outcome: replace(outcome, events=outcome.events[:-1])),
    "state": (WrongAnswer, lambda outcome: replace(outcome, states=(11, 10))),
    "alarm": (WrongAnswer, lambda outcome: replace(outcome, output="lightning_hiercomm: no rank got on")),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_rank_that_is_not_right_is_noticed(outcomes, what):
    kind, tamper = TAMPERED[what]
    with pytest.raises(kind):
        judge(PLAIN, [outcomes[0], tamper(outcomes[1])])


@pytest.mark.parametrize(
    ("program", "error", "kind"),
    [
        (PLAIN, "RankFailure: lightning_hiercomm: rank 1 failed", Refusal),
        (RAISES, "RuntimeError: gloo: Connection closed by peer", Unexplained),
        (RAISES, "TypeError: 'int' object is not callable lightning_hiercomm: rank 0 failed", Refusal),
    ],
    ids=["refused", "unexplained", "mistake"],
)
def test_an_error_without_its_cause_or_right_is_noticed(program, error, kind):
    with pytest.raises(kind):
        judge(program, [Outcome("error", error)] * 2)


def test_programs_of_a_number_are_always_the_same_and_have_all_actions():
    programs = [drawn(number) for number in range(1000)]
    assert programs == [drawn(number) for number in range(1000)]
    assert all(map(goes_together, programs))
    assert {action.name for program in programs for action in program.actions} == {*ACTIONS}
