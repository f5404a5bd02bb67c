"""Replicas that are simulated, and the clock they go by."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from simulated import Simulated

from benchmarks.predict.cluster import Cluster, Link, Workload
from benchmarks.simulate.simulation import (
    Experiment,
    Site,
    simulate,
)
from benchmarks.simulate.tasks import Batches
from benchmarks.zoo import TASKS
from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, StepsDelay

TASK = TASKS["characters"]
# 4 MB between nodes at 10 MB/s: an agreement of two nodes takes 0.4 s
SITE = Site(Cluster(2, 1, Link(math.inf), Link(1e7)), Workload.of_step(1e6, 1.0))
DEFAULTS = {"label": "it", "nodes": 2, "steps": 12, "learning_rate": 0.1, "batch": 8, "task": TASK}


def experiment(scheme, **others):
    return Experiment(scheme=scheme, **{**DEFAULTS, **others})


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters, strict=True))


def test_a_simulation_gives_the_same_bits_each_time():
    first, again, other = (simulate(experiment(Gossip(), nodes=5, seed=seed), SITE) for seed in (0, 0, 1))
    assert same(first, again)
    assert first.points == again.points
    assert not same(first, other)


@pytest.mark.parametrize(
    ("scheme", "nodes"),
    [
        pytest.param(PeriodicAveraging(5), 2, marks=pytest.mark.nightly),
        pytest.param(PeriodicAveraging(5), 4, marks=pytest.mark.nightly),
        pytest.param(DASO(4, 1, warmup=0, cooldown=0), 2, marks=pytest.mark.nightly),
        (DiLoCo(4, fragments=2, staleness=1), 2),
        (Gossip(), 4),
        pytest.param(AllReduce(), 2, marks=pytest.mark.nightly),
    ],
    ids=["periodic-2x2", "periodic-4x1", "daso-2x2", "diloco-2x2", "gossip-4x1", "all_reduce-2x2"],
)
def test_four_replicas_equal_four_processes_exactly(fit, scheme, nodes):
    made = experiment(scheme, nodes=nodes, ranks_per_node=4 // nodes)
    simulated = simulate(made, SITE).parameters
    reports = fit(Simulated(made), {"scheme": scheme, "ranks_per_node": 4 // nodes})
    for report in reports:
        for own, expected in zip(simulated, report["state_dict"].values(), strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=0)


def test_two_optimizers_in_turn_equal_those_of_processes_exactly(fit):
    made = experiment(PeriodicAveraging(5), ranks_per_node=2, task=TASKS["gan"], learning_rate=1e-3)
    simulated = simulate(made, SITE).parameters
    strategy = {"scheme": made.scheme, "find_unused_parameters": True}
    for report in fit(Simulated(made), strategy):
        for own, expected in zip(simulated, report["state_dict"].values(), strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=0)


def test_the_averaged_model_is_evaluated_at_given_steps():
    curve = simulate(experiment(PeriodicAveraging(5)), SITE, evaluations=3)
    assert [point.step for point in curve.points] == [4, 8, 12]
    assert curve.best.accuracy == max(point.accuracy for point in curve.points)
    assert curve.first_to_reach(2.0) is None
    assert curve.first_to_reach(curve.best.accuracy) == curve.best


def test_evaluating_does_not_change_training():
    scheme = DiLoCo(4, fragments=2, staleness=1)
    once, often = (simulate(experiment(scheme), SITE, evaluations=looks) for looks in (1, 12))
    assert same(once, often)


@pytest.mark.parametrize(
    ("scheme", "seconds"),
    [
        (AllReduce(), 12 * 1.3),  # the backward pass hides the first bucket, of 1 MB; the other has 3 MB
        (PeriodicAveraging(4), 12 * 1.0 + 3 * 0.4),
        (PeriodicAveraging(None), 12 * 1.0 + 0.4),
        (PeriodicAveraging(5), 12 * 1.0 + 3 * 0.4),  # twice, and at the end
        (DiLoCo(6), 12 * 1.0 + 2 * 0.4),
        (DASO(4, 1, warmup=0, cooldown=0), 12 * 1.0),
        (DASO(4, 1, cooldown=0, warmup=5), 12 * 1.0 + 5 * 0.4),
        (StepsDelay(2, warmup_steps=4), 12 * 1.0 + 4 * 0.3),
    ],
)
def test_predicted_times_follow_the_phases_of_a_scheme(scheme, seconds):
    curve = simulate(experiment(scheme), SITE)
    assert curve.points[-1].seconds == pytest.approx(seconds, rel=0.05)
    assert curve.points[0].seconds < curve.points[-1].seconds


@pytest.mark.parametrize(
    ("scheme", "kilobytes"),
    [
        (PeriodicAveraging(12), 12 + 0.5),  # of gradients, in each step; then a rank has half of what is averaged on
        (DASO(12, 0, warmup=0, cooldown=0, reducer="sharded"), 12 + 0.5),
    ],
    ids=repr,
)
def test_predicted_times_include_traffic_inside_nodes(scheme, kilobytes):
    slow_inside = replace(SITE, cluster=Cluster(2, 2, Link(1e3), Link(math.inf)))
    curve = simulate(experiment(scheme, ranks_per_node=2), replace(slow_inside, workload=Workload.of_step(250, 1e-6)))
    # two ranks send each other a kilobyte in a second
    assert curve.points[-1].seconds == pytest.approx(kilobytes, abs=0.01)


def test_an_unsupported_scheme_is_refused():
    with pytest.raises(ValueError, match="one exchange is pending at a time"):
        simulate(experiment(DiLoCo(4, fragments=["0"], staleness=3)), SITE)


def after_one_step(**others):
    """The parameters after one step of plain SGD, and what they were."""
    made = experiment(AllReduce(), steps=1, optimizer=plain_sgd, **others)
    return simulate(made, SITE).parameters, [p.detach() for p in TASK.model().parameters()]


def plain_sgd(parameters, learning_rate):
    return torch.optim.SGD(parameters, learning_rate)


@pytest.mark.parametrize(("weights", "shares"), [(None, (0.75, 0.25)), ((1.0, 3.0), (0.25, 0.75))])
def test_unequal_ranks_weigh_by_their_examples_by_default(weights, shares):
    after, before = after_one_step(batches=(6, 2), weights=weights)
    model = TASK.model()
    gradients = []
    for rank, size in enumerate((6, 2)):
        (turn,) = TASK.turns
        loss = turn.loss(model, Batches(TASK, rank, size).draw())
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for own, start, *parts in zip(after, before, *gradients, strict=True):
        mean = sum(share * part for share, part in zip(shares, parts, strict=True))
        torch.testing.assert_close(own.detach(), start - 0.1 * mean)
