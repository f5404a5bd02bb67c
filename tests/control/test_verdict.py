"""What is said of ranks that do not get on, and of ranks that differ at a barrier."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from lightning_hiercomm.control.verdict import Arrival, Status, deadlock, standstill
from lightning_hiercomm.control.waiting import Wait

BACKWARD = Wait(60.0, "backward", "a", "train.py:9 (main)", 3)
SAVING = Wait(60.5, "trainer.save_checkpoint", "b", "", 3)
GATHER = Wait(60.5, "torch.distributed.all_gather", "b", "", 3)
STOP_ALIKE = (
    "All ranks must take equally many steps: give them equally many batches, or set limit_train_batches, and in manual"
    " optimization call optimizer.step() equally often. A loop that stops early, by a KL divergence for instance, must"
    " stop on all ranks alike: trainer.strategy.reduce_boolean_decision(kl > limit, all=False)"
)


def statuses(*own: dict) -> list[Status]:
    return [Status(rank, f"rank {rank}", **settings) for rank, settings in enumerate(own)]


def cause(*own: dict) -> str:
    return deadlock(statuses(*own), 60.0).partition("\nLikely cause: ")[2]


def test_ranks_that_wait_in_different_places_are_a_deadlock_with_a_table():
    save, train = "saving a checkpoint of epoch 0", "training batch 4 of epoch 0"
    said = deadlock(statuses({"wait": SAVING, "doing": save}, {"wait": BACKWARD, "doing": train, "batches": 5}), 60.0)
    assert said.splitlines() == [
        "no rank made progress for 60 s (hang_timeout): the ranks wait for each other in different places",
        "rank   | waits in                | during                         | line of the program",
        "---------------------------------------------------------------------------------------",
        "rank 0 | trainer.save_checkpoint | saving a checkpoint of epoch 0 | -",
        "rank 1 | backward                | training batch 4 of epoch 0    | train.py:9 (main)",
        "Likely cause: rank 0 called trainer.save_checkpoint and the others did not. Call trainer.save_checkpoint on"
        " all ranks; only rank 0 writes the file",
    ]


def test_the_likely_cause_of_other_waits_is_a_collective_on_some_ranks():
    assert cause({"wait": GATHER}, {"wait": BACKWARD}).startswith("some ranks called other collectives (barrier, all_g")


@pytest.mark.parametrize(
    "of_one", [{"wait": replace(GATHER, call="teardown (lightning_hiercomm)")}, {"has_left": True}]
)
def test_the_likely_cause_of_an_end_on_some_ranks_is_their_stop(of_one):
    assert cause(of_one, {"wait": BACKWARD}).startswith(
        "training ended on some ranks only. All ranks must take equally"
    )


def test_a_rank_that_has_left_is_in_the_table():
    said = deadlock(statuses({"wait": BACKWARD}, {"wait": BACKWARD}, {"has_left": True}), 60.0)
    assert "rank 2 | has ended its run |" in said


def test_ranks_that_wait_in_one_place_with_unequal_collectives_are_a_deadlock():
    said = cause({"wait": BACKWARD}, {"wait": replace(BACKWARD, collectives=4)})
    assert said.startswith("rank 1 called more collectives (barrier, all_gather,")


def test_ranks_that_wait_at_different_batches_took_unequal_steps():
    said = cause({"wait": BACKWARD, "batches": 7}, {"wait": BACKWARD, "batches": 8})
    assert said == f"The ranks took unequal numbers of optimizer steps. {STOP_ALIKE}"


@pytest.mark.parametrize("call", ["backward", "optimizer_step (lightning_hiercomm)"])
def test_the_likely_cause_of_a_step_that_others_do_not_take_is_an_unequal_number(call):
    at_end = {"wait": replace(GATHER, call="on_train_batch_end (lightning_hiercomm)"), "arrival": "epoch"}
    said = cause({"wait": replace(BACKWARD, call=call)}, at_end, at_end)
    ended = "ranks 1-2 ended a batch, and rank 0 did not. The ranks took unequal numbers of optimizer steps."
    assert said == f"{ended} {STOP_ALIKE}"


def test_a_collective_of_the_user_does_not_count_as_an_unequal_number_of_steps():
    at_end = {"wait": replace(BACKWARD, call="on_train_batch_end (lightning_hiercomm)"), "arrival": "epoch"}
    assert cause({"wait": GATHER}, at_end).startswith("some ranks called other collectives")


@pytest.mark.parametrize(
    "waits",
    [(BACKWARD, BACKWARD), (SAVING, None), (SAVING, replace(BACKWARD, seconds=59.0))],
    ids=["in one place", "one computes", "one has not waited for long"],
)
def test_other_long_waits_are_no_deadlock(waits):
    assert deadlock(statuses(*({"wait": wait} for wait in waits)), 60.0) is None


IDLE = {"progress": 1, "idle": 70.0, "doing": "training batch 3"}


def test_the_report_of_a_standstill_names_who_is_busy_and_who_waits():
    said = standstill(statuses({**IDLE, "wait": BACKWARD}, {**IDLE, "line": "train.py:5 (log)"}, IDLE), 60.0, 2.0)
    assert said.partition("goes on: ")[2] == (
        "rank 0, training batch 3, waits in backward in train.py:9 (main); rank 1, training batch 3, is busy in"
        " train.py:5 (log); rank 2, training batch 3, is busy"
    )


@pytest.mark.parametrize("other", [{"idle": 61.0}, {"progress": 0}, {"stuck": 31.0}], ids=str)
def test_ranks_that_move_or_have_not_begun_or_are_stuck_are_no_standstill(other):
    assert standstill(statuses(IDLE, {**IDLE, **other}), 60.0, 2.0) is None


def test_a_standstill_before_the_first_batch_is_reported_where_ranks_wait():
    begins = {"idle": 70.0, "doing": "starting"}
    assert standstill(statuses(begins, begins), 60.0, 2.0) is None  # both may load data
    assert standstill(statuses({**begins, "wait": replace(BACKWARD, seconds=61.0)}, begins), 60.0, 2.0) is not None


def test_a_status_survives_json():
    status = Status(1, "rank 1", wait=BACKWARD)
    assert Status.of(asdict(status)) == status


# ---- barriers --------------------------------------------------------------------------------------------------------

AVERAGE = Arrival(1, 0, "rank 0 (node 0)", "average", "", "train.py:3 (on_fit)", 4, [])


def of_rank_1(**other: object) -> Arrival:
    return replace(AVERAGE, rank=1, place="rank 1 (node 1)", **other)


def test_equal_arrivals_do_not_differ():
    assert AVERAGE.difference(of_rank_1(line="train.py:4 (on_fit)")) is None


@pytest.mark.parametrize("swapped", [False, True])
def test_unequal_steps_at_a_barrier_are_reported_with_the_ranks(swapped):
    first, second = replace(AVERAGE, steps=[4, 2]), of_rank_1(steps=[4, 3])
    assert (second.difference(first) if swapped else first.difference(second)) == (
        "rank 0 (node 0) has taken 4, 2 steps of its optimizers and rank 1 (node 1) 4, 3 steps of its optimizers."
        f" {STOP_ALIKE}"
    )


def test_the_rank_with_the_cause_comes_first_with_its_remedy():
    reduces = of_rank_1(purpose="reduce", what=" (sum of float32)")
    assert AVERAGE.difference(reduces) == (
        "rank 1 reduced a value (sum of float32), and rank 0 asked for the averaged model in train.py:3 (on_fit). Call"
        " self.log(..., sync_dist=True) and strategy.reduce on all ranks alike"
    )


def test_a_cause_in_another_line_is_reported_with_it():
    saved = "rank 1 called trainer.save_checkpoint"
    said = of_rank_1(purpose="save", line="").difference(AVERAGE)
    assert said.startswith(f"{saved}, and rank 0 asked for the averaged model in train.py:3")
    assert f"{saved} in a.py:1 (f), and" in of_rank_1(purpose="save", line="a.py:1 (f)").difference(AVERAGE)


def test_ranks_that_reduce_different_values_differ():
    sums = [" (sum of float32)", " (sum of int64)"]
    first, second = replace(AVERAGE, purpose="reduce", what=sums[0]), of_rank_1(purpose="reduce", what=sums[1])
    said = "rank 0 reduced a value (sum of float32), and rank 1 reduced a value (sum of int64) in train.py:3"
    assert second.difference(first).startswith(said)


@pytest.mark.parametrize(
    ("purpose", "did", "remedy"),
    [("end", "ended training", "If trainer.should_stop was set on some ranks only"), ("epoch", "ended an epoch", "")],
)
def test_a_barrier_that_another_rank_has_passed_is_reported_with_the_remedy(purpose, did, remedy):
    said = replace(AVERAGE, purpose=purpose, line="").without_others("rank 1 trains on with batch 5 of the run")
    head = f"rank 0 (node 0) {did} after 4 batches of the run, and rank 1 trains on with batch 5 of the run. All ranks"
    assert said.startswith(head)
    assert remedy in said
