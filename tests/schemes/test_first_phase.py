"""A synchronous first phase: averaged gradients at every step, then the scheme's own schedule."""

from __future__ import annotations

from functools import partial

import harness
import numpy
import pytest
import torch
from harness import attached, on_nodes, on_ranks, steps

from lightning_hiercomm.schemes import AllReduce, DiLoCo, PeriodicAveraging

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

# two nodes of two ranks: targets 0, 2 and 4, 10, so 1 and 7 by node, and 4 by all; every step goes half of the way
SYNCHRONOUS = [2.0, 3.0, 3.5]
LOCAL = {0: [2.25, 1.625], 1: [5.25, 6.125]}


def test_steps_equal_averaged_sgd_and_then_nodes_train_alone(run_oracle):
    traces = run_oracle(lambda: PeriodicAveraging(4, at_epoch_end=False, warmup_steps=3), steps_per_epoch=8)
    for rank, trace in enumerate(traces):
        # the fourth step of the epoch ends in a mean, (2.25 + 5.25) / 2
        first, second = LOCAL[rank // 2][0], 0.5 * (3.75 + (1.0, 7.0)[rank // 2])
        assert first in (2.25, 5.25)
        assert trace.after_step[:5] == [*SYNCHRONOUS, 3.75, second]
        assert trace.after_step[7] == trace.finished


def test_the_first_phase_is_all_reduce_to_the_bit(run_oracle):
    periodic = run_oracle(lambda: PeriodicAveraging(4, warmup_steps=6), steps_per_epoch=6, epochs=1, momentum=0.9)
    baseline = run_oracle(AllReduce, steps_per_epoch=6, epochs=1, momentum=0.9)
    assert [trace.after_step for trace in periodic] == [trace.after_step for trace in baseline]


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


@pytest.mark.parametrize("length", [-1, -0.5, 1.0, 1.5])
@pytest.mark.parametrize("scheme", [PeriodicAveraging, DiLoCo])
def test_lengths_out_of_range_are_named(scheme, length):
    with pytest.raises(ValueError, match=f"warmup_steps={length} must be a number"):
        scheme(warmup_steps=length)


def test_diloco_begins_from_the_parameters_at_the_end_of_the_phase():
    # node targets 0 and 6 (one rank each), mean 3: 1.5, 2.25 by averaged gradients; then each goes half of its way
    def work(rank):
        seen = []
        for _ in range(6):
            rank.train()
            seen.append(rank.values.item())
        return seen

    outer = partial(torch.optim.SGD, lr=1.0, momentum=0.5)
    first, second = on_nodes(work, DiLoCo(2, outer, warmup_steps=2), targets=(0.0, 6.0))
    # reference 2.25; nodes end at 0.5625 and 5.0625, mean 2.8125: the outer gradient is -0.5625, momentum from zero
    assert first[:4] == [1.5, 2.25, 1.125, 2.8125]
    assert second[:4] == [1.5, 2.25, 4.125, 2.8125]
    # then the mean goes to 2.953125: the momentum is 0.5 * -0.5625 - 0.140625
    assert first[5] == second[5] == 2.8125 + 0.140625 + 0.28125


def test_the_schedule_of_diloco_counts_from_the_end_of_the_phase():
    ranks = on_nodes(steps(3 + 4), DiLoCo(4, warmup_steps=3))
    assert [rank.scheme.state.exchanges_started for rank in ranks] == [1, 1]
    ranks = on_nodes(steps(3 + 3), DiLoCo(4, warmup_steps=3))
    assert [rank.scheme.state.exchanges_started for rank in ranks] == [0, 0]


@pytest.mark.parametrize("wire", [None, "bfloat16", "int4"])
@pytest.mark.parametrize("saved_after", [2, 4, 5])
@pytest.mark.parametrize(
    "scheme",
    [
        PeriodicAveraging(3, warmup_steps=4),
        DiLoCo(4, fragments=2, staleness=1, warmup_steps=4),
        PeriodicAveraging(3, order="before_step", warmup_steps=4),
    ],
)
def test_a_resumed_run_equals_one_that_never_stopped(scheme, saved_after, wire):
    training = {
        "shapes": [(300,)],
        "targets": None,
        "wire": wire,
        "inner": partial(torch.optim.SGD, lr=0.1, momentum=0.5),
    }

    def whole(topology):
        with attached(topology, scheme, **training) as rank:
            steps(saved_after)(rank)
            state = rank.state()
            steps(8)(rank)
            return state, rank.values

    def resumed(state, topology):
        with attached(topology, scheme, **training, begins_epoch=False) as rank:
            rank.load(state)
            rank.scheme.begin_run(None, None)
            steps(8)(rank)
            return rank.values

    nodes = ((0, 1), (2, 3))
    before = on_ranks(whole, nodes)
    after = on_ranks(lambda topology: resumed(before[topology.rank][0], topology), nodes)
    for (_, expected), values in zip(before, after, strict=True):
        assert torch.equal(expected, values)


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


def test_error_feedback_of_gradients_ends_with_the_phase():
    def work(rank):
        steps(3)(rank)
        during = rank.gradients.state_dict()
        steps(2)(rank)
        return during, rank.gradients.state_dict()

    for during, after in on_nodes(
        work, PeriodicAveraging(8, warmup_steps=4), shapes=[(300,)], targets=None, wire="int4"
    ):
        assert during["feedback"]
        assert after == {}


def test_float_buffers_are_averaged_when_the_phase_ends():
    def work(rank):
        rank.module.buffer.fill_(float(rank.topology.rank))
        steps(2)(rank)
        return rank.module.buffer.item(), rank.scheme.state.unsynchronized_steps

    assert on_nodes(work, PeriodicAveraging(8, warmup_steps=2), buffer=torch.zeros(1)) == [(0.5, 0), (0.5, 0)]


def test_looking_at_the_averaged_model_changes_nothing_in_the_phase():
    scheme = PeriodicAveraging(3, warmup_steps=4)
    looked = on_nodes(steps(7, look=True), scheme, shapes=[(5,)], targets=None, nodes=((0,), (1,), (2,)))
    quiet = on_nodes(steps(7), scheme, shapes=[(5,)], targets=None, nodes=((0,), (1,), (2,)))
    assert [rank.values.tolist() for rank in looked] == [rank.values.tolist() for rank in quiet]
    for rank in looked:
        assert rank.looks[1] == rank.trace[1]


def test_nonfinite_values_in_the_phase_raise_on_all_ranks():
    scheme = harness.with_policy(PeriodicAveraging(4, warmup_steps=20), on_nonfinite="raise")
    with pytest.raises(Exception, match="NaN or infinite"):
        on_nodes(steps(10), scheme, targets=(float("nan"), 1.0))


def test_without_the_phase_nothing_of_it_is_saved():
    (rank, *_) = on_nodes(steps(2), PeriodicAveraging(4))
    assert "first_phase" not in rank.scheme.state_dict(shared=True)
    assert "warmup_steps" not in repr(PeriodicAveraging(4))
