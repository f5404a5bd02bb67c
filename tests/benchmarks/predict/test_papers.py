"""The papers' formulas are special cases of the cost model."""

from __future__ import annotations

import math

import pytest

from benchmarks.predict.cluster import Cluster, Link, Workload
from benchmarks.predict.cost import predict
from benchmarks.predict.node import ddp_buckets
from lightning_hiercomm.schemes import AllReduce, StepsDelay


@pytest.mark.parametrize("replicas", [2, 4, 64])
@pytest.mark.parametrize("algorithm", ["ring", "halving"])
def test_an_all_reduce_costs_what_table_1_of_paper_000_says(replicas, algorithm):
    """The table prints R in place of the number of elements, which its source (Ok-Topk) has there."""
    alpha, beta, elements = 1.0, 0.5, 1000
    cost = Link(bandwidth=1 / beta, latency=alpha, algorithm=algorithm).cost("all_reduce", replicas, elements)
    rounds = replicas - 1 if algorithm == "ring" else math.log2(replicas)
    expected = 2 * rounds * alpha + 2 * (replicas - 1) / replicas * elements * beta
    assert cost.seconds + cost.delay == pytest.approx(expected)


def two_nodes(model_seconds: float, workload: Workload) -> Cluster:
    """A link on which half the model, a push or a pull, takes ``model_seconds / 2``, without latency."""
    return Cluster(2, 1, Link(math.inf), Link(workload.model_bytes / model_seconds))


@pytest.mark.parametrize("delay", [1, 2, 4])
@pytest.mark.parametrize("push", [0.5, 1.4, 1.6, 2.9, 3.1, 20.0])
def test_steps_delay_takes_as_long_as_equation_4_of_paper_001_says(gigabyte, delay, push):
    """Gradients leave together when the backward pass has ended: the paper's model has one layer."""
    alone = gigabyte.forward + gigabyte.backward
    pull = push
    pushes_hide = push < alone  # behind computation; the pull hides in part, and counts once per delay
    expected = alone + max(0.0, push + pull - alone) / delay if pushes_hide else push + pull / delay
    predicted = predict(StepsDelay(delay, warmup_steps=0), two_nodes(2 * push, gigabyte), gigabyte)
    # sections follow each other, so the first is on its way while the others wait: a 16th of a push
    assert predicted.seconds == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("model_seconds", "hides"), [(0.1, True), (1.0, True), (10.0, False)])
def test_all_reduce_takes_as_long_as_equation_2_of_paper_001_says(gigabyte, model_seconds, hides):
    """The layers of the paper are DDP's buckets, whose gradients leave in the order of the backward pass."""
    backward = [gigabyte.backward * group.bytes / gigabyte.model_bytes for group in ddp_buckets(gigabyte.model_bytes)]
    sending = [model_seconds * group.bytes / gigabyte.model_bytes for group in ddp_buckets(gigabyte.model_bytes)]
    assert (sum(backward[1:]) > sum(sending[:-1])) == hides
    if hides:
        expected = gigabyte.forward + gigabyte.backward + sending[-1]
    else:
        # DDP's first bucket is small, so the link waits for the second: a "bubble" counts as communication
        expected = gigabyte.forward + backward[0] + model_seconds + backward[1] - sending[0]
    predicted = predict(AllReduce(), two_nodes(model_seconds, gigabyte), gigabyte)
    assert predicted.seconds == pytest.approx(expected, rel=1e-6)
