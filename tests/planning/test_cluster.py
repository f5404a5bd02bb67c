"""What moves cost on a link: by the alpha-beta model, and from measured curves."""

from __future__ import annotations

import pytest

from lightning_hiercomm.planning.cluster import Cluster, CostCurve, Link, Workload, rounds_of

MODEL = 1e6


@pytest.mark.parametrize(
    ("move", "members", "ring", "halving"),
    [
        ("all_reduce", 1, 0, 0),
        ("all_reduce", 2, 2, 2),
        ("all_reduce", 8, 14, 6),
        ("all_reduce", 5, 8, 6),
        ("reduce_scatter", 8, 7, 3),
        ("all_gather", 8, 7, 3),
        ("broadcast", 8, 3, 3),
        ("exchange", 8, 1, 1),
    ],
)
def test_rounds(move, members, ring, halving):
    assert (rounds_of(move, members, "ring"), rounds_of(move, members, "halving")) == (ring, halving)


def test_a_collective_costs_bytes_and_rounds():
    cost = Link(bandwidth=1e9, latency=1e-3, algorithm="ring").cost("all_reduce", 4, MODEL)
    assert cost.bytes == 1.5e6
    assert cost.seconds == pytest.approx(1.5e-3)
    assert cost.delay == pytest.approx(6e-3)


def test_ranks_of_a_node_share_its_link():
    link = Link(bandwidth=1e9)
    assert link.cost("exchange", 2, MODEL, sharing=4).seconds == pytest.approx(4e-3)
    assert link.cost("exchange", 2, MODEL, sharing=1).seconds == pytest.approx(1e-3)


def test_a_group_of_one_sends_nothing():
    assert Link(1e9, 1e-3).cost("all_reduce", 1, MODEL).seconds == 0


CURVE = CostCurve(members=2, sharing=2, points=((8, 1e-3, 1e-4), (1e6, 2e-3, 3e-4), (2e6, 4e-3, 7e-4)))


@pytest.mark.parametrize(
    ("sent", "seconds", "processors"),
    [
        (1, 1e-3, 1e-4),  # all latency
        (1e6, 2e-3, 3e-4),
        (1.5e6, 3e-3, 5e-4),  # between two points
        (4e6, 8e-3, 15e-4),  # beyond the last, as steep as before it
    ],
)
def test_a_curve_goes_through_its_points(sent, seconds, processors):
    assert CURVE.seconds(sent, 1) == pytest.approx(seconds)
    assert CURVE.processor_seconds(sent, 1) == pytest.approx(processors)


def test_a_curve_scales_only_its_latency_with_the_rounds():
    assert CURVE.seconds(1e6, 3) == pytest.approx(2e-3 + 2 * 1e-3)


def test_a_faster_link_has_the_same_latency():
    faster = CURVE.faster(2)
    assert faster.points == ((8, 1e-3, 1e-4), (1e6, 1.5e-3, 3e-4), (2e6, 2.5e-3, 7e-4))
    link = Link(1e9, 1e-3, curves={"exchange": CURVE}).faster(10)
    assert (link.bandwidth, link.latency) == (1e10, 1e-3)


def test_measured_curves_override_latency_and_bandwidth():
    link = Link(1.0, 1.0, "ring", curves={"exchange": CURVE})
    both = link.cost("exchange", 2, 1e6, sharing=2)
    assert (both.seconds, both.delay, both.processor_seconds) == pytest.approx((2e-3, 0, 3e-4))
    alone = link.cost("exchange", 2, 2e6, sharing=1)  # as many bytes on the link, more work for one rank
    assert (alone.seconds, alone.processor_seconds) == pytest.approx((2e-3, 7e-4))
    assert link.cost("all_gather", 2, 2e6).seconds == pytest.approx(1e6)  # not measured


def test_a_curve_of_two_members_is_scaled_to_a_thousand():
    curve = CostCurve(members=2, sharing=1, points=((8, 1e-3, 0), (1e6, 2e-3, 0)))
    cost = Link(1.0, 1.0, "ring", curves={"all_reduce": curve}).cost("all_reduce", 1024, 1e6)
    sent = 2 * 1023 / 1024 * 1e6
    assert cost.seconds == pytest.approx(1e-3 * (sent - 1e6) / (1e6 - 8) + 1e-3 + 1023 * 1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(0, 1, Link(1), Link(1)), "nodes=0"),
        (lambda: Cluster(1, 0, Link(1), Link(1)), "ranks_per_node=0"),
        (lambda: Workload(0, 1, 1), "parameters=0"),
        (lambda: Workload(1, 0, 0), "must take some time"),
        (lambda: Workload(1, -1, 3), "must take some time"),
        (lambda: Workload(1, 1, 1, dtype="int8"), "dtype='int8'"),
    ],
)
def test_impossible_clusters_and_workloads_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
