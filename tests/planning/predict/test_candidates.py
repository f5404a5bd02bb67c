"""What is considered, and what is recommended."""

from __future__ import annotations

import re

import pytest

from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.predict.candidates import Candidate, candidates, plan
from lightning_hiercomm.planning.predict.cost import predict
from lightning_hiercomm.planning.predict.cycles import drift
from lightning_hiercomm.planning.predict.report import table
from lightning_hiercomm.planning.quantities import shown_seconds
from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, StepsDelay

INSIDE = Link(3e11, 5e-6)


def on(bandwidth: float, nodes: int = 8, ranks: int = 8) -> Cluster:
    return Cluster(nodes, ranks, INSIDE, Link(bandwidth, 5e-5))


MODEL = Workload.of_step(1e9, 0.4)


def test_every_scheme_is_considered_and_every_setting_can_be_made():
    found = list(candidates(on(1e9), Workload.of_step(1e9, 0.4, state_per_parameter=1), (None, "int8")))
    assert {candidate.name for candidate in found} == {
        "DDPStrategy",
        "AllReduce",
        "PeriodicAveraging",
        "DASO",
        "StepsDelay",
        "Gossip",
        "DiLoCo",
    }
    assert found[0].kind is None
    for candidate in found[1:]:
        assert type(candidate.scheme) is candidate.kind


def test_steps_delay_is_left_out_for_adam():
    assert "StepsDelay" not in {candidate.name for candidate in candidates(on(1e9), MODEL)}


@pytest.mark.parametrize("bandwidth", [1e12, 1e9, 1e6])
def test_daso_with_a_merge_in_every_step_is_no_candidate(bandwidth):
    often, seldom = (DASO(sync_every, 1) for sync_every in (1, 2))
    assert predict(often, on(bandwidth), MODEL).seconds >= predict(seldom, on(bandwidth), MODEL).seconds
    assert 1 not in {c.arguments["sync_every"] for c in candidates(on(bandwidth), MODEL) if c.kind is DASO}


def test_a_wire_that_is_no_narrower_is_left_out():
    narrow = Workload.of_step(1e9, 0.4, dtype="bfloat16")
    assert {candidate.wire_dtype for candidate in candidates(on(1e9), narrow, (None, "bfloat16", "int8"))} == {
        None,
        "int8",
    }


@pytest.mark.parametrize(
    ("candidate", "nodes", "steps"),
    [
        (Candidate(None), 8, 0),
        (Candidate(AllReduce), 8, 0),
        (Candidate(PeriodicAveraging, {"sync_every": 16}), 8, 16),
        (Candidate(DASO, {"sync_every": 4, "staleness": 2}), 8, 6),
        (Candidate(StepsDelay, {"delay": 4}), 8, 5),
        (Candidate(Gossip), 2, 1),
        (Candidate(Gossip), 8, 3),
        (Candidate(Gossip, {"overlap": True}), 8, 5),
        (Candidate(DiLoCo, {"sync_every": 100, "fragments": 4, "staleness": 4}), 8, 104),
    ],
)
def test_drift_counts_steps_apart(candidate, nodes, steps):
    assert drift(candidate.scheme, nodes) == steps


def test_a_fast_network_needs_no_scheme_that_trains_apart():
    made = plan(on(1e12), MODEL)
    assert made.chosen.candidate == Candidate(AllReduce)
    assert "accuracy: as DDP. This is DDP." in made.reason


def test_only_gradients_sent_as_they_are_train_as_ddp_does():
    made = plan(on(1e12), MODEL, ("int8",))
    assert made.chosen.candidate == Candidate(AllReduce, wire_dtype="int8")
    assert "as DDP" not in made.reason
    assert "gradients sent as int8" in made.reason


@pytest.mark.parametrize("bandwidth", [1e12, 1.25e10, 1e9, 1e6])
def test_settings_without_a_known_loss_are_recommended_first(bandwidth):
    made = plan(on(bandwidth), MODEL)
    assert made.chosen.accuracy.is_kept
    assert f"accuracy: {made.chosen.accuracy}" in made.reason
    faster = [row for row in made.rows if row.overhead < made.chosen.overhead and row.accuracy.is_kept]
    assert made.chosen.overhead <= made.target or not faster


def test_the_reason_names_the_fastest_setting_if_none_meets_the_target():
    made = plan(on(1e6), MODEL)
    fastest = min(made.rows, key=lambda row: row.prediction.seconds)
    assert not fastest.accuracy.is_kept
    assert f"{fastest.candidate.title} with wire_dtype={fastest.candidate.wire_dtype!r} would take" in made.reason
    assert f"accuracy: {fastest.accuracy}" in made.reason


def test_the_table_has_the_accuracy_of_each_row():
    made = plan(on(1e9), MODEL)
    header, _, *lines = table(made, everything=True).splitlines()
    assert header.endswith("accuracy")
    for row, line in zip(made.rows, lines, strict=False):
        assert line.endswith(f"  {row.accuracy}")


def test_ddp_is_named_where_it_is_faster_than_the_fastest_scheme():
    slow = Cluster(8, 8, INSIDE, Link(1e6, 5e-5), world=Link(1e12))
    made = plan(slow, MODEL)
    assert made.rows[0].prediction.seconds < made.chosen.prediction.seconds
    assert f"DDP would take {shown_seconds(made.rows[0].prediction.seconds)}" in made.reason


def test_the_recommendation_is_the_widest_type_that_meets_the_target():
    made = plan(on(1.25e10), MODEL)
    assert made.chosen.overhead <= 0.05
    assert made.chosen.candidate == Candidate(AllReduce, wire_dtype="int8")
    wider = [row for row in made.rows if row.candidate.kind is AllReduce and row.candidate.wire_dtype is None]
    assert all(row.overhead > 0.05 for row in wider)


@pytest.mark.long("predicts all candidates for several networks")
def test_slower_networks_get_fewer_bytes():
    sent = [plan(on(bandwidth), MODEL).chosen.prediction.inter_bytes for bandwidth in (1e12, 2e10, 5e9, 1e9)]
    assert sent == sorted(sent, reverse=True)
    assert sent[0] > sent[-1]


def test_the_fastest_lossless_setting_is_chosen_if_none_meets_target():
    made = plan(on(1e6), MODEL)
    kept = [row for row in made.rows if row.accuracy.is_kept]
    assert made.chosen.prediction.seconds == min(row.prediction.seconds for row in kept)


def test_the_widest_type_is_preferred_if_it_meets_target():
    assert plan(on(1e12), MODEL, (None, "bfloat16")).chosen.candidate.wire_dtype is None


def test_settings_beyond_memory_are_not_recommended():
    free = plan(on(1e9), MODEL)
    needs = free.chosen.prediction.memory_bytes
    tight = plan(on(1e9), MODEL, memory=needs - 1)
    assert tight.chosen.fits
    assert tight.chosen.candidate != free.chosen.candidate


def test_a_model_that_fits_nowhere_is_refused():
    with pytest.raises(ValueError, match=r"a rank needs at least 1\d GB .* more than 1 GB"):
        plan(on(1e9), MODEL, memory=1e9)


def test_speed_up_is_against_ddp_and_overhead_against_one_node():
    made = plan(on(1e9), MODEL)
    ddp, *others = made.rows
    assert ddp.speedup == 1
    for row in others:
        assert row.speedup == pytest.approx(ddp.prediction.seconds / row.prediction.seconds)
        assert row.overhead == pytest.approx(row.prediction.seconds / made.alone - 1)


def test_the_short_table_has_one_row_per_scheme():
    best = plan(on(1e9), MODEL).best_of_each()
    assert [row.candidate.name for row in best] == [
        "DDPStrategy",
        "AllReduce",
        "PeriodicAveraging",
        "DASO",
        "Gossip",
        "DiLoCo",
    ]


def test_the_reason_and_the_table_show_the_same_all_reduce():
    made = plan(on(2e8, nodes=2), Workload.of_step(3.5e8, 0.4))
    (row,) = [row for row in made.best_of_each() if row.candidate.kind is AllReduce]
    assert made.chosen.candidate.kind is PeriodicAveraging
    (said,) = re.findall(r"AllReduce( with wire_dtype='\w+')? would take ([\d.]+ m?s)", made.reason)
    wire = row.candidate.wire_dtype
    assert said == (f" with wire_dtype={wire!r}" if wire else "", shown_seconds(row.prediction.seconds))
    assert f"AllReduce() {wire or 'as it is'} {said[1]} " in re.sub(" +", " ", table(made))


def test_the_table_shows_a_setting_that_fits_into_memory():
    free = plan(on(1e9), MODEL)
    tight = plan(on(1e9), MODEL, memory=free.chosen.prediction.memory_bytes - 1)
    assert tight.chosen in tight.best_of_each()


@pytest.mark.parametrize(
    ("workload", "wires", "left_out"),
    [
        (MODEL, (None,), {"StepsDelay": "is made for SGD"}),
        (Workload.of_step(1e9, 0.4, state_per_parameter=1), (None,), {}),
        (
            Workload.of_step(1e9, 0.4, state_per_parameter=1),
            ("int8",),
            {"StepsDelay": "float32 and bfloat16"},
        ),
    ],
)
def test_schemes_that_are_left_out_are_named_with_the_reason(workload, wires, left_out):
    made = plan(on(1e9), workload, wires)
    lines = [line for line in table(made).splitlines() if line.startswith("not in the table: ")]
    assert len(lines) == len(left_out)
    for line, (name, reason) in zip(lines, left_out.items(), strict=True):
        assert line.startswith(f"not in the table: {name}")
        assert reason in line


def test_a_wire_that_narrows_nothing_is_no_wire():
    workload = Workload.of_step(1e9, 0.4, dtype="bfloat16")
    assert list(candidates(on(1e9), workload, ("bfloat16",))) == list(candidates(on(1e9), workload, (None,)))
