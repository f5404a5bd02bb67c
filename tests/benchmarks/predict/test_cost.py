"""Predicted steps on clusters so simple that they can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.predict.cluster import Cluster, Link
from benchmarks.predict.cost import predict
from lightning_hiercomm.schemes import (
    DASO,
    AllReduce,
    DiLoCo,
    Gossip,
    PeriodicAveraging,
    Scheme,
    StepsDelay,
)

GB = 1e9


def test_a_blocking_synchronization_adds_time_per_period(fast_cluster, gigabyte):
    # two nodes send each other the model: one second
    for period in (1, 4, 16, 500):
        predicted = predict(PeriodicAveraging(period), fast_cluster(2), gigabyte)
        assert predicted.seconds == pytest.approx(3 + 1 / period)
        assert predicted.exposed_seconds == pytest.approx(1 / period)
        assert predicted.inter_bytes == pytest.approx(GB / period)


@pytest.mark.parametrize(
    ("bandwidth", "staleness", "seconds"),
    [
        (1.0, 1, 3.0),  # a second hides behind a step of three
        (0.2, 1, 3 + 2 / 4),  # of five, three do
        (0.1, 1, 3 + 7 / 4),
        (0.1, 4, 3.0),  # four steps hide ten seconds
        (0.05, 4, 3 + 8 / 4),
    ],
)
def test_daso_hides_exchanges_that_fit_into_its_staleness(fast_cluster, gigabyte, bandwidth, staleness, seconds):
    scheme = DASO(4, staleness)
    predicted = predict(scheme, fast_cluster(2, inter=bandwidth * GB), gigabyte)
    # the first bucket of an exchange may leave when the last but one of the exchange before it has come
    assert predicted.seconds == pytest.approx(seconds, rel=0.02)


def test_overlapped_gossip_takes_the_longer_of_computation_and_link(fast_cluster, gigabyte):
    for bandwidth, seconds in ((1.0, 3.0), (0.1, 10.0)):
        predicted = predict(Gossip(overlap=True), fast_cluster(4, inter=bandwidth * GB), gigabyte)
        assert predicted.seconds == pytest.approx(seconds)
    assert predict(Gossip(), fast_cluster(4, inter=0.1 * GB), gigabyte).seconds == pytest.approx(13)


def test_streaming_fragments_hide_one_by_one(fast_cluster, gigabyte):
    slow = fast_cluster(2, inter=0.1 * GB)  # ten seconds for the model
    assert predict(DiLoCo(20), slow, gigabyte).seconds == pytest.approx(3 + 10 / 20)
    # a quarter of the model hides behind one step
    streaming = predict(DiLoCo(20, fragments=4, staleness=1), slow, gigabyte)
    assert streaming.seconds == pytest.approx(3.0)
    assert streaming.inter_bytes == pytest.approx(GB / 20)


def test_latency_costs_rounds(fast_cluster, gigabyte):
    tiny = replace(gigabyte, parameters=1)
    for nodes, rounds in ((2, 2), (1024, 20)):
        predicted = predict(PeriodicAveraging(1), fast_cluster(nodes, latency=0.01), tiny)
        assert predicted.seconds == pytest.approx(3 + rounds * 0.01)


def test_on_one_node_every_scheme_is_ddp(fast_cluster, gigabyte):
    for scheme in (AllReduce(), PeriodicAveraging(4), DASO(), StepsDelay(), Gossip(), DiLoCo()):
        predicted = predict(scheme, fast_cluster(1, 4), gigabyte)
        assert predicted.seconds == pytest.approx(3.0)
        assert predicted.inter_bytes == 0


def test_ddp_sends_a_ring_over_all_ranks(fast_cluster, gigabyte):
    predicted = predict(None, fast_cluster(2, 4), gigabyte)
    assert predicted.inter_bytes == pytest.approx(2 * 7 / 8 * GB)


def test_collectives_inside_a_node_share_its_network(gigabyte):
    # every rank sends half of its gradients to the other one, and half of the sums back: ten seconds at 0.1 GB/s
    predicted = predict(AllReduce(), Cluster(2, 2, Link(0.1 * GB), Link(math.inf)), gigabyte)
    assert 10 < predicted.seconds < 3 + 10


def test_an_unknown_period_is_refused(fast_cluster, gigabyte):
    with pytest.raises(ValueError, match="give a number"):
        predict(PeriodicAveraging(None), fast_cluster(2), gigabyte)


def test_a_user_scheme_is_refused(fast_cluster, gigabyte):
    class Own(Scheme):
        pass

    with pytest.raises(TypeError, match="Own"):
        predict(Own(), fast_cluster(2), gigabyte)
