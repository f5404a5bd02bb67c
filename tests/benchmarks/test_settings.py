"""What is measured where, in which sessions, and what is left of it."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

pytest.importorskip("benchmarks")

from benchmarks.contenders import ROWS, is_peer, same_method
from benchmarks.measure import Cell
from benchmarks.settings import PRESETS, Batch, Setting, TimeLeft, batches, clock_steps, moment, unknown_rows

SETTING = Setting("mlp11m", 2, 2, 500.0, ("link", "ddp", "periodic", "hand", "accelerate"))


def sessions(setting=SETTING, rows=None, known=None, repetitions=3, seconds=2.0, longest=60.0):
    return list(
        batches(setting, rows or setting.rows, known or {}, repetitions, clock_steps(None, seconds), 1, 120.0, longest)
    )


@pytest.mark.parametrize("setting", PRESETS["all"], ids=str)
def test_a_peer_is_measured_where_the_row_is_that_does_the_same(setting):
    assert set(setting.rows) <= ROWS.keys()
    compared = {peer for row in setting.rows for peer in same_method(row, setting.ranks_per_node)}
    peers = {row for row in setting.rows if is_peer(row)} - {"post_local", "hand1"}
    assert peers <= compared
    assert "ddp" in peers


def test_all_is_four_rates_on_two_layouts():
    places = {(it.nodes, it.ranks_per_node, it.mbit) for it in PRESETS["all"]}
    assert places == {(*layout, rate) for layout in ((2, 2), (4, 1)) for rate in (100.0, 500.0, 1000.0, 10000.0)}


def test_every_session_has_the_bases_first_and_every_row_is_in_one():
    found = sessions()
    assert len(found) > 1
    assert [row for batch in found for row in batch.rows] == list(SETTING.rows)
    for batch in found:
        one = len(batch.jobs) // 3
        assert [job.row for job in batch.jobs[:one]] == ["local", "node", "node_shared", *batch.rows]
        assert [job.seed for job in batch.jobs] == sorted([0, 1, 2] * one)
    assert len(sessions(longest=1e6)) == 1


def test_rows_on_nodes_of_one_rank_have_no_node_to_average_in():
    alone = Setting("mlp1m", 4, 1, 500.0, ("ddp",))
    assert [job.row for job in sessions(alone, repetitions=1)[0].jobs] == ["local", "ddp"]


def test_a_slow_row_has_three_steps_and_time_enough():
    (batch,) = sessions(known={"ddp": Cell("ddp", "", "mlp11m", 2, 2, 500.0, step_ms=30e3)}, rows=["ddp"], longest=1e6)
    ddp = [job for job in batch.jobs if job.row == "ddp"]
    assert {job.steps for job in ddp} == {3}
    assert all(job.timeout > 4 * 30 * job.total_steps for job in ddp)
    assert clock_steps(7, 2.0)(30.0) == 7


def test_known_rows_are_those_measured_often_enough_and_since_then():
    def cell(row, each, when="2026-11-22T18:00:00+00:00", error=None):
        return Cell(row, "", "mlp11m", 2, 2, 500.0, step_ms_each=each, when=when, error=error)

    known = {
        "ddp": cell("ddp", [1.0, 1.0, 1.0]),
        "hand": cell("hand", [1.0]),
        "periodic": cell("periodic", [], error="hung"),
    }
    rows = ["ddp", "hand", "periodic", "gossip"]
    assert unknown_rows(rows, known, 3, None) == ["hand", "periodic", "gossip"]
    assert "ddp" not in unknown_rows(rows, known, 3, moment("2026-11-22T17:59"))
    assert "ddp" in unknown_rows(rows, known, 3, datetime(2026, 11, 22, 18, 1, tzinfo=timezone.utc))


def test_time_left_learns_from_what_estimates_were_wrong_by():
    plan = [Batch(SETTING, (), (), 100.0) for _ in range(3)]
    left = TimeLeft(plan)
    assert left.seconds == 300
    left.done(plan[0], 150.0)
    assert (left.seconds, left.of(plan[1])) == (300, 150)
