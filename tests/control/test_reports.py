"""What is said of ranks that do not get on, and of ranks that differ at a barrier."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hiercomm.control.reports import Arrival, Status, standstill

BACKWARD = {"seconds": 60.0, "call": "backward", "digest": "a", "line": "train.py:9 (main)", "collectives": 3}
GATHER = {"seconds": 60.5, "call": "torch.distributed.all_gather", "digest": "b", "collectives": 3}
STOP_ALIKE = (
    "All ranks must take equally many steps: give them equally many batches, or set limit_train_batches, and in manual"
    " optimization call optimizer.step() equally often. A loop that stops early, by a KL divergence for instance, must"
    " stop on all ranks alike: trainer.strategy.reduce_boolean_decision(kl > limit, all=False)"
)


def statuses(*own: dict) -> list[Status]:
    return [Status(rank=rank, place=f"rank {rank}", **settings) for rank, settings in enumerate(own)]


def cause(*own: dict) -> str:
    text, is_deadlock = standstill(statuses(*own), 60.0)
    assert is_deadlock
    return text.partition("\nLikely cause: ")[2]


def test_ranks_that_wait_in_different_places_are_a_deadlock_with_a_table():
    gathers, trains = "past training batch 3 of epoch 0", "training batch 4 of epoch 0"
    own = {**GATHER, "doing": gathers, "collectives": 4}, {**BACKWARD, "doing": trains, "batches": 5}
    assert standstill(statuses(*own), 60.0)[0].splitlines() == [
        "no rank made progress for 60 s (hang_timeout): the ranks wait for each other in different places",
        "rank   | waits in                     | during                           | line of the program",
        "----------------------------------------------------------------------------------------------",
        "rank 0 | torch.distributed.all_gather | past training batch 3 of epoch 0 | -",
        "rank 1 | backward                     | training batch 4 of epoch 0      | train.py:9 (main)",
        "Likely cause: rank 0 called more collectives (barrier, all_gather, all_reduce, self.log(..., sync_dist=True))"
        " than other ranks. Call them on all ranks alike",
    ]


@pytest.mark.parametrize("of_one", [{**GATHER, "arrival": "end"}, {"has_left": True}])
def test_the_likely_cause_of_an_end_on_some_ranks_is_their_stop(of_one):
    assert cause(of_one, BACKWARD).startswith("training ended on some ranks only. All ranks must take equally")


def test_a_rank_that_has_left_is_in_the_table():
    assert "rank 2 | has ended its run |" in standstill(statuses(BACKWARD, BACKWARD, {"has_left": True}), 60.0)[0]


def test_the_likely_cause_of_other_waits_is_a_collective_on_some_ranks():
    assert cause(GATHER, BACKWARD).startswith("some ranks called other collectives (barrier, all_gather, all_reduce,")


@pytest.mark.parametrize("call", ["backward", "on_train_batch_end (lightning_hiercomm)"])
def test_the_likely_cause_of_waits_in_steps_is_an_unequal_number_of_them(call):
    said = cause({**BACKWARD, "batches": 7}, {**BACKWARD, "call": call, "batches": 8})
    assert said == f"the ranks took unequal numbers of optimizer steps. {STOP_ALIKE}"


@pytest.mark.parametrize(
    "own",
    [(BACKWARD, BACKWARD), (GATHER, {}), (GATHER, {**BACKWARD, "seconds": 59.0})],
    ids=["in one place", "one computes", "one has not waited for long"],
)
def test_other_long_waits_are_no_deadlock(own):
    assert standstill(statuses(*own), 60.0) == ("", False)


IDLE = {"has_begun": True, "idle": 73.0, "doing": "training batch 3"}


def test_a_standstill_shows_who_is_busy_and_who_waits():
    text, is_deadlock = standstill(statuses({**IDLE, **BACKWARD}, {**IDLE, "line": "train.py:5 (log)"}, IDLE), 60.0)
    assert not is_deadlock
    assert text.splitlines() == [
        "no rank made progress for 60 s (hang_timeout), and the run goes on",
        "rank   | waits in | during           | line of the program",
        "----------------------------------------------------------",
        "rank 0 | backward | training batch 3 | train.py:9 (main)",
        "rank 1 | is busy  | training batch 3 | train.py:5 (log)",
        "rank 2 | is busy  | training batch 3 | -",
    ]


@pytest.mark.parametrize("other", [{"idle": 61.0}, {"has_begun": False}], ids=str)
def test_ranks_that_move_or_have_not_begun_are_no_standstill(other):
    assert standstill(statuses(IDLE, {**IDLE, **other}), 60.0) == ("", False)


def test_a_standstill_before_the_first_batch_is_reported_where_ranks_wait():
    begins = {"idle": 73.0, "doing": "starting"}
    assert standstill(statuses(begins, begins), 60.0) == ("", False)  # both may load data
    assert standstill(statuses({**begins, **BACKWARD}, begins), 60.0)[0]


# ---- barriers --------------------------------------------------------------------------------------------------------

AVERAGE = Arrival(1, 0, "rank 0 (node 0)", "average", "", "train.py:3 (on_fit)", 4, [])


def of_rank_1(**other: object) -> Arrival:
    return replace(AVERAGE, rank=1, place="rank 1 (node 1)", **other)


def test_equal_arrivals_do_not_differ():
    assert AVERAGE.difference(of_rank_1(line="train.py:4 (on_fit)")) is None


@pytest.mark.parametrize("swapped", [False, True])
def test_unequal_steps_at_a_barrier_are_reported_with_the_ranks(swapped):
    first, second = replace(AVERAGE, steps=[4, 2]), of_rank_1(steps=[4, 3])
    asked = "asked for the averaged model after 4 batches of the run and {} optimizer steps in train.py:3 (on_fit)"
    assert (second.difference(first) if swapped else first.difference(second)) == (
        f"rank 0 (node 0) {asked.format('4, 2')}, and rank 1 (node 1) {asked.format('4, 3')}. {STOP_ALIKE}"
    )


def test_the_rank_with_the_cause_comes_first_with_its_remedy():
    reduces = of_rank_1(purpose="reduce", what=" (sum of float32)", line="")
    assert AVERAGE.difference(reduces) == (
        "rank 1 (node 1) reduced a value (sum of float32) after 4 batches of the run, and rank 0 (node 0) asked for the"
        " averaged model after 4 batches of the run in train.py:3 (on_fit). Call self.log(..., sync_dist=True) and"
        " strategy.reduce on all ranks alike"
    )


def test_ranks_that_reduce_different_values_differ():
    sums = [" (sum of float32)", " (sum of int64)"]
    first, second = replace(AVERAGE, purpose="reduce", what=sums[0]), of_rank_1(purpose="reduce", what=sums[1])
    said = second.difference(first)
    assert said.startswith("rank 0 (node 0) reduced a value (sum of float32) after")
    assert "and rank 1 (node 1) reduced a value (sum of int64) after" in said


@pytest.mark.parametrize(
    ("purpose", "did", "remedy"),
    [("end", "ended training", "If trainer.should_stop was set on some ranks only"), ("epoch", "ended an epoch", "")],
)
def test_a_barrier_that_another_rank_has_passed_is_reported_with_the_remedy(purpose, did, remedy):
    said = replace(AVERAGE, purpose=purpose, line="").without_others("rank 1 trains on with batch 5 of the run")
    head = f"rank 0 (node 0) {did} after 4 batches of the run, and rank 1 trains on with batch 5 of the run. All ranks"
    assert said.startswith(head)
    assert remedy in said
