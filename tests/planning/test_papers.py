"""The papers' formulas, by hand and as special cases of the cost model."""

from __future__ import annotations

import math

import pytest
from papers_formulas import Iteration, Layer, all_reduce_seconds

from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.predict.cost import predict
from lightning_hiercomm.planning.predict.node import ddp_buckets
from lightning_hiercomm.schemes import AllReduce, StepsDelay

# ---- paper 000, Table I ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [2, 4, 64])
@pytest.mark.parametrize(("algorithm", "row"), [("ring", "ring"), ("halving", "dense")])
def test_a_links_all_reduce_is_table_1s(replicas, algorithm, row):
    cost = Link(bandwidth=1 / 0.5, latency=1.0, algorithm=algorithm).cost("all_reduce", replicas, 1000)
    expected = all_reduce_seconds(replicas, 1000, alpha=1.0, beta=0.5)[row]
    assert cost.seconds + cost.delay == pytest.approx(expected)


# ---- paper 001 -------------------------------------------------------------------------------------------------------


def iteration(push: float, rest: float, forward: float = 1.0, backward: float = 2.0) -> Iteration:
    """A model of one layer, whose gradients leave when the backward pass has ended."""
    return Iteration(forward, [Layer(backward, push, rest)])


def test_equation_2_by_hand():
    hidden = Iteration(1.0, [Layer(2.0, 0.25, 0.25), Layer(3.0, 0.5, 0.5), Layer(1.0, 1.0, 1.0)])
    # the first layers' backward passes, 2 + 3, hide the last layers' communication, 1 + 2
    assert hidden.synchronous_seconds == 1 + 6 + 0.5
    slow = Iteration(1.0, [Layer(2.0, 4.0, 4.0), Layer(1.0, 4.0, 4.0)])
    assert slow.synchronous_seconds == 1 + 16 + 1


@pytest.mark.parametrize(
    ("push", "rest", "case", "expected"),
    [
        (1.0, 1.0, 3, 3.0),  # T_c = 2 ends before the next iteration does
        (2.0, 2.5, 1, 3.0 + (4.5 + 2 - 1 - 4) / 4),
        (4.0, 5.0, 2, 4.0 + (9 + 2 - 2 - 4) / 4),
    ],
)
def test_equation_4_by_hand(push, rest, case, expected):
    assert iteration(push, rest).delayed_case() == case
    assert iteration(push, rest).delayed_seconds(4) == expected


# ---- the cost model's predictions ------------------------------------------------------------------------------------


def two_nodes(model_seconds: float, workload: Workload) -> Cluster:
    """A link on which half the model, a push or a pull, takes ``model_seconds / 2``, without latency."""
    return Cluster(2, 1, Link(math.inf), Link(workload.model_bytes / model_seconds))


@pytest.mark.parametrize("delay", [1, 2, 4])
@pytest.mark.parametrize(("push", "case"), [(0.5, 3), (1.4, 3), (1.6, 1), (2.9, 1), (3.1, 2), (20.0, 2)])
def test_the_prediction_for_steps_delay_is_equation_4(gigabyte, delay, push, case):
    it = iteration(push, push)
    assert it.delayed_case() == case
    predicted = predict(StepsDelay(delay, warmup_steps=0), two_nodes(2 * push, gigabyte), gigabyte)
    # sections follow each other, so the first is on its way while the others wait: a 16th of a push
    assert predicted.seconds == pytest.approx(it.delayed_seconds(delay), rel=0.03)


@pytest.mark.parametrize(("model_seconds", "hides"), [(0.1, True), (1.0, True), (10.0, False)])
def test_the_prediction_for_all_reduce_is_equation_2(gigabyte, model_seconds, hides):
    sizes = [piece.bytes / gigabyte.model_bytes for piece in reversed(ddp_buckets(gigabyte.model_bytes))]
    it = Iteration(1.0, [Layer(2.0 * size, size * model_seconds / 2, size * model_seconds / 2) for size in sizes])
    expected = it.synchronous_seconds
    if not hides:  # DDP's first bucket is small, so the link waits for the second: a "bubble" counts as communication
        expected += 2.0 * sizes[-2] - model_seconds * sizes[-1]
    predicted = predict(AllReduce(), two_nodes(model_seconds, gigabyte), gigabyte)
    assert predicted.seconds == pytest.approx(expected, rel=1e-6)
