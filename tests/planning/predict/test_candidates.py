"""What is considered, and what is recommended."""

from __future__ import annotations

import pytest

from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.predict.candidates import Candidate, candidates, plan
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
    assert candidate.drift(nodes) == steps


def test_a_fast_network_needs_no_scheme_that_trains_apart():
    made = plan(on(1e12), MODEL)
    assert made.chosen.candidate == Candidate(AllReduce)
    assert "exactly as DDP does" in made.reason


def test_the_recommendation_has_the_least_drift_that_meets_the_target():
    made = plan(on(1.25e10), MODEL)
    assert made.chosen.overhead <= 0.05
    assert made.chosen.drift > 0
    assert all(row.overhead > 0.05 for row in made.rows if row.drift < made.chosen.drift)
    assert "AllReduce would take" in made.reason


def test_slower_networks_get_settings_that_agree_less_often():
    drifts = [plan(on(bandwidth), MODEL).chosen.drift for bandwidth in (1e12, 2e10, 5e9, 1e9)]
    assert drifts == sorted(drifts)
    assert drifts[0] < drifts[-1]


def test_where_nothing_meets_the_target_the_fastest_is_recommended():
    made = plan(on(1e6), MODEL)
    assert made.chosen.prediction.seconds == min(row.prediction.seconds for row in made.rows)
    assert "Nothing comes below 5%" in made.reason


def test_as_it_is_comes_before_narrower_where_both_meet_the_target():
    assert plan(on(1e12), MODEL, (None, "bfloat16")).chosen.candidate.wire_dtype is None


def test_what_does_not_fit_into_memory_is_not_recommended():
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
