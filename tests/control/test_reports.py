"""What is said of ranks that do not get on, and of ranks that differ at a barrier."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lightning_hiercomm.control.reports import Arrival, Status, standstill

BACKWARD = {"seconds": 60.0, "call": "backward", "digest": "a", "line": "train.py:9 (main)", "collectives": 3}
SAVING = {"seconds": 60.5, "call": "trainer.save_checkpoint", "digest": "b", "collectives": 3}
GATHER = {"seconds": 60.5, "call": "torch.distributed.all_gather", "digest": "b", "collectives": 3}
STOP_ALIKE = (
    "All ranks must take equally many steps: give them equally many batches, or set limit_train_batches, and in manual"
    " optimization call optimizer.step() equally often. A loop that stops early, by a KL divergence for instance, must"
    " stop on all ranks alike: trainer.strategy.reduce_boolean_decision(kl > limit, all=False)"
)


def report(*own: dict) -> tuple[str, bool]:
    statuses = [Status(rank=rank, place=f"rank {rank}", **settings) for rank, settings in enumerate(own)]
    return standstill(statuses, 60.0, 2.0)


def cause(*own: dict) -> str:
    text, is_deadlock = report(*own)
    assert is_deadlock
    return text.partition("\nLikely cause: ")[2]


def test_ranks_that_wait_in_different_places_are_a_deadlock_with_a_table():
    save, train = "saving a checkpoint of epoch 0", "training batch 4 of epoch 0"
    text, is_deadlock = report({**SAVING, "doing": save}, {**BACKWARD, "doing": train, "batches": 5})
    assert is_deadlock
    assert text.splitlines() == [
        "no rank made progress for 60 s (hang_timeout): the ranks wait for each other in different places",
        "rank   | waits in                | during                         | line of the program",
        "---------------------------------------------------------------------------------------",
        "rank 0 | trainer.save_checkpoint | saving a checkpoint of epoch 0 | -",
        "rank 1 | backward                | training batch 4 of epoch 0    | train.py:9 (main)",
        "Likely cause: rank 0 called trainer.save_checkpoint and the others did not. Call trainer.save_checkpoint on"
        " all ranks; only rank 0 writes the file",
    ]


def test_the_likely_cause_of_other_waits_is_a_collective_on_some_ranks():
    assert cause(GATHER, BACKWARD).startswith("some ranks called other collectives (barrier, all_g")


@pytest.mark.parametrize("of_one", [{**GATHER, "call": "teardown (lightning_hiercomm)"}, {"has_left": True}])
def test_the_likely_cause_of_an_end_on_some_ranks_is_their_stop(of_one):
    assert cause(of_one, BACKWARD).startswith("training ended on some ranks only. All ranks must take equally")


def test_a_rank_that_has_left_is_in_the_table():
    assert "rank 2 | has ended its run |" in report(BACKWARD, BACKWARD, {"has_left": True})[0]


def test_ranks_that_wait_in_one_place_with_unequal_collectives_are_a_deadlock():
    said = cause(BACKWARD, {**BACKWARD, "collectives": 4})
    assert said.startswith("rank 1 called more collectives (barrier, all_gather,")


def test_ranks_that_wait_at_different_batches_took_unequal_steps():
    said = cause({**BACKWARD, "batches": 7}, {**BACKWARD, "batches": 8})
    assert said == f"The ranks took unequal numbers of optimizer steps. {STOP_ALIKE}"


AT_END = {"call": "on_train_batch_end (lightning_hiercomm)", "arrival": "epoch"}


@pytest.mark.parametrize("call", ["backward", "optimizer_step (lightning_hiercomm)"])
def test_the_likely_cause_of_a_step_that_others_do_not_take_is_an_unequal_number(call):
    said = cause({**BACKWARD, "call": call}, {**GATHER, **AT_END}, {**GATHER, **AT_END})
    ended = "ranks 1-2 ended a batch, and rank 0 did not. The ranks took unequal numbers of optimizer steps."
    assert said == f"{ended} {STOP_ALIKE}"


def test_a_collective_of_the_user_does_not_count_as_an_unequal_number_of_steps():
    assert cause(GATHER, {**BACKWARD, **AT_END}).startswith("some ranks called other collectives")


@pytest.mark.parametrize(
    "own",
    [(BACKWARD, BACKWARD), (SAVING, {}), (SAVING, {**BACKWARD, "seconds": 59.0})],
    ids=["in one place", "one computes", "one has not waited for long"],
)
def test_other_long_waits_are_no_deadlock(own):
    assert report(*own) == ("", False)


IDLE = {"progress": 1, "idle": 70.0, "doing": "training batch 3"}


def test_the_table_of_a_standstill_shows_who_is_busy_and_who_waits():
    text, is_deadlock = report({**IDLE, **BACKWARD}, {**IDLE, "line": "train.py:5 (log)"}, IDLE)
    assert not is_deadlock
    assert text.splitlines() == [
        "no rank made progress for 60 s (hang_timeout), and the run goes on",
        "rank   | waits in | during           | line of the program",
        "----------------------------------------------------------",
        "rank 0 | backward | training batch 3 | train.py:9 (main)",
        "rank 1 | is busy  | training batch 3 | train.py:5 (log)",
        "rank 2 | is busy  | training batch 3 | -",
    ]


@pytest.mark.parametrize("other", [{"idle": 61.0}, {"progress": 0}, {"stuck": 31.0}], ids=str)
def test_ranks_that_move_or_have_not_begun_or_are_stuck_are_no_standstill(other):
    assert report(IDLE, {**IDLE, **other}) == ("", False)


def test_a_standstill_before_the_first_batch_is_reported_where_ranks_wait():
    begins = {"idle": 70.0, "doing": "starting"}
    assert report(begins, begins) == ("", False)  # both may load data
    assert report({**begins, **BACKWARD}, begins)[0]


# ---- barriers --------------------------------------------------------------------------------------------------------

AVERAGE = Arrival(1, 0, "rank 0 (node 0)", "average", "", "train.py:3 (on_fit)", 4, [])


def of_rank_1(**other: object) -> Arrival:
    return replace(AVERAGE, rank=1, place="rank 1 (node 1)", **other)


def test_equal_arrivals_do_not_differ():
    assert AVERAGE.difference(of_rank_1(line="train.py:4 (on_fit)")) is None


@pytest.mark.parametrize("swapped", [False, True])
def test_unequal_steps_at_a_barrier_are_reported_with_the_ranks(swapped):
    first, second = replace(AVERAGE, steps=[4, 2]), of_rank_1(steps=[1])
    asked = "asked for the averaged model after 4 batches of the run in train.py:3 (on_fit)"
    assert (second.difference(first) if swapped else first.difference(second)) == (
        f"rank 0 (node 0) {asked} with 4, 2 optimizer steps, and rank 1 (node 1) {asked} with 1 optimizer step."
        f" {STOP_ALIKE}"
    )


def test_the_rank_with_the_cause_comes_first_with_its_remedy():
    reduces = of_rank_1(purpose="reduce", what=" (sum of float32)", line="a.py:1 (f)", batches=0)
    assert AVERAGE.difference(reduces) == (
        "rank 1 (node 1) reduced a value (sum of float32) in a.py:1 (f), and rank 0 (node 0) asked for the averaged"
        " model after 4 batches of the run in train.py:3 (on_fit). Call self.log(..., sync_dist=True) and"
        " strategy.reduce on all ranks alike"
    )


def test_ranks_that_reduce_different_values_differ():
    sums = [" (sum of float32)", " (sum of int64)"]
    first, second = replace(AVERAGE, purpose="reduce", what=sums[0]), of_rank_1(purpose="reduce", what=sums[1])
    said = r"rank 0 \(node 0\) reduced a value \(sum of float32\) .*, and rank 1 \(node 1\) reduced .* \(sum of int64\)"
    assert re.match(said, second.difference(first))


@pytest.mark.parametrize(
    ("purpose", "did", "remedy"),
    [("end", "ended training", "If trainer.should_stop was set on some ranks only"), ("epoch", "ended an epoch", "")],
)
def test_a_barrier_that_another_rank_has_passed_is_reported_with_the_remedy(purpose, did, remedy):
    said = replace(AVERAGE, purpose=purpose, line="").without_others("rank 1 trains on with batch 5 of the run")
    head = f"rank 0 (node 0) {did} after 4 batches of the run, and rank 1 trains on with batch 5 of the run. All ranks"
    assert said.startswith(head)
    assert remedy in said
