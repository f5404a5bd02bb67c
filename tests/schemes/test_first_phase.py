"""A synchronous first phase: averaged gradients at every step, then the scheme's own schedule."""

from __future__ import annotations

import numpy
import pytest
import torch
from harness import attached, on_nodes, on_ranks, steps

from lightning_hiercomm.schemes import AllReduce, DiLoCo, PeriodicAveraging

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


@pytest.mark.parametrize("number", [float, numpy.float32])
def test_a_share_of_the_run_is_rounded_to_steps(number):
    def work(rank):
        phases = []
        for _ in range(8):
            rank.train()
            phases.append(rank.scheme.scalars()["phase"])
        return phases

    seen = on_nodes(work, PeriodicAveraging(4, warmup_steps=number(0.29)), steps=10)
    assert seen == [[0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize("scheme", [PeriodicAveraging(4, warmup_steps=0.25), DiLoCo(4, warmup_steps=0.25)])
def test_a_share_of_a_run_of_unknown_length_is_refused(scheme):
    with pytest.raises(ValueError, match=r"warmup_steps=0\.25 is a fraction of the run, .*max_steps"):
        on_nodes(steps(1), scheme, steps=None)


def test_nodes_that_have_trained_alone_do_not_begin_a_first_phase(caplog):
    def work(topology):
        with attached(topology, PeriodicAveraging(8)) as rank:
            state = steps(2)(rank).state()
        with attached(topology, PeriodicAveraging(8, warmup_steps=6), begins_epoch=False) as rank:
            rank.load(state)
            rank.scheme.begin_run(None, None)
            return steps(1)(rank).scheme.phase, rank.values.item()

    (first, low), (second, high) = on_ranks(work, ((0,), (1,)))
    assert (first, second) == ("training", "training")
    assert low != high
    assert "skips warmup_steps=6" in caplog.text


def test_a_shorter_phase_ends_where_the_run_goes_on():
    def work(topology):
        with attached(topology, DiLoCo(4, warmup_steps=6)) as rank:
            state = steps(3)(rank).state()
        with attached(topology, DiLoCo(4, warmup_steps=2), begins_epoch=False) as rank:
            rank.load(state)
            rank.scheme.begin_run(None, None)
            steps(3)(rank)
            before = rank.scheme.state.exchanges_started, rank.values.item()
            return before, steps(1)(rank).scheme.state.exchanges_started

    ((before, low), after), ((_, high), _) = on_ranks(work, ((0,), (1,)))
    assert (before, after) == (0, 1)
    assert low != high


def test_first_phase_encodes_gradients_and_not_parameters():
    def sent(scheme, wire):
        ranks = on_nodes(steps(4), scheme, shapes=[(4096,)], wire=wire)
        return ranks[0].meter.bytes["inter"]

    phase, reduced = PeriodicAveraging(4, at_epoch_end=False, warmup_steps=8), AllReduce()
    for wire in (None, "int8", "int4"):
        assert sent(phase, wire) == sent(reduced, wire) > 0
    assert sent(phase, None) / sent(phase, "int4") > 7.5


def test_float_buffers_are_averaged_when_the_phase_ends():
    def work(rank):
        rank.module.buffer.fill_(float(rank.topology.rank))
        steps(2)(rank)
        return rank.module.buffer.item(), rank.scheme.state.unsynchronized_steps

    assert on_nodes(work, PeriodicAveraging(8, warmup_steps=2), buffer=torch.zeros(1)) == [(0.5, 0), (0.5, 0)]


def test_nonfinite_values_in_the_phase_raise_on_all_ranks():
    with pytest.raises(Exception, match="NaN or infinite"):
        on_nodes(steps(10), PeriodicAveraging(4, warmup_steps=20), targets=(float("nan"), 1.0))
