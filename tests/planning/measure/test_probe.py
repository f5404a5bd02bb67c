"""What a probe makes of what it has timed."""

from __future__ import annotations

import pytest
import torch

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.planning.cluster import Cluster, Link, Workload
from lightning_hiercomm.planning.measure.probe import _averaging, _mean, _slowest, _workload
from lightning_hiercomm.planning.measure.steps import StepTimes
from lightning_hiercomm.planning.measure.stopwatch import ProcessorShare
from lightning_hiercomm.planning.predict.cost import predict
from lightning_hiercomm.schemes import AllReduce, PeriodicAveraging

INSTANT = Link(float("inf"))
STEP = Workload(1e6, 0.03, 0.07, threads=1.0)


@pytest.mark.parametrize(
    ("processors", "seconds", "averaging"),
    [
        (None, 0.15, 0.05),
        (1.0, 0.30, 0.05),  # two ranks in turn take 0.2 s
        (None, 0.09, 0.0),  # noise
    ],
)
def test_averaging_is_the_time_beyond_collectives(processors, seconds, averaging):
    cluster = Cluster(2, 2, INSTANT, INSTANT, processors=processors)
    assert _averaging(cluster, STEP, seconds) == pytest.approx(averaging)


def test_averaging_costs_schemes_that_average_only():
    cluster = Cluster(2, 2, INSTANT, INSTANT)
    step = Workload(1e6, 0.03, 0.07, averaging=0.05)
    assert predict(PeriodicAveraging(4), cluster, step).seconds == pytest.approx(0.15)


def test_averaging_costs_only_all_reduce_on_one_rank_nodes():
    cluster = Cluster(4, 1, INSTANT, INSTANT)
    step = Workload(1e6, 0.03, 0.07, averaging=0.05)
    assert predict(PeriodicAveraging(4), cluster, step).seconds == pytest.approx(0.10)
    assert predict(AllReduce(), cluster, step).seconds == pytest.approx(0.15)
    assert predict(None, cluster, step).seconds == pytest.approx(0.15)


def test_a_workload_is_the_mean_of_two_timings():
    assert _mean(Workload(1e6, 0.03, 0.07, 0.01), Workload(1e6, 0.05, 0.09, 0.03)) == Workload(1e6, 0.04, 0.08, 0.02)


@pytest.mark.parametrize(
    ("each", "dtype", "whole"), [(2.0, "bfloat16", 2e6), (4.0, "float32", 4e6), (8.0, "float64", 8e6)]
)
def test_a_model_is_as_large_as_its_parameters_are(each, dtype, whole):
    step = StepTimes(0.1, 0.1, 0.1, 0.1, 0.0, 1e6, each, 0.0)
    found = _workload([step], ProcessorShare(None, 1), torch.device("cpu"))
    assert (found.dtype, found.model_bytes) == (dtype, whole)
    for wire in (None, "bfloat16", "int8"):
        sent = predict(PeriodicAveraging(1), Cluster(2, 1, INSTANT, INSTANT), found, wire).inter_bytes
        assert sent == pytest.approx(whole * {None: 1, "bfloat16": 2 / each, "int8": 1 / each}[wire], rel=0.05)


def test_a_module_that_ddp_refuses_is_probed_without_averaging():
    def work(rank, world):
        topology = Topology([[0, 1]], rank, world.connect(rank), Meter())
        slower = StepTimes(0.1, 0.1, 0.1 + rank, 0.1, 0.0, 1, 4.0, 0.0)

        def train(average_in=None, steps=None):
            assert (average_in, steps) == (topology, 7)
            return slower

        def refuse(average_in=None, steps=None):
            raise RuntimeError("Expected to have finished reduction in the prior iteration")

        return _slowest(topology, train, 7), _slowest(topology, refuse, 7)

    assert ThreadWorld(2).run(work) == [(pytest.approx(1.3), 0.0)] * 2
