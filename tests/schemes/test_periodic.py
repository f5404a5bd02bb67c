"""PeriodicAveraging, against the numbers worked by hand from eDNNcomm's Eq. 8 and 9."""

from __future__ import annotations

import pytest

from lightning_hiercomm.schemes import AllReduce, PeriodicAveraging

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

AFTER = [(0.5, 3.5), (3, 3), (2, 5), (3.75, 3.75), (3.875, 3.875), (2.4375, 5.4375), (3.96875, 3.96875)]
BEFORE = [
    (0.5, 3.5),
    (2.25, 3.75),
    (1.625, 5.375),
    (3.1875, 4.3125),
    (2.65625, 5.09375),
    (1.828125, 6.046875),
    (3.5234375, 4.4140625),
]


@pytest.mark.parametrize(("order", "expected"), [("after_step", AFTER), ("before_step", BEFORE)])
def test_two_nodes_follow_the_table_to_the_digit(run_oracle, order, expected):
    traces = run_oracle(lambda: PeriodicAveraging(2, order=order), epochs=2, steps_per_epoch=5)
    # the epoch's last synchronization comes after its last step when the order is "after_step"
    for rank, trace in enumerate(traces):
        seen = list(trace.after_step)
        if order == "after_step":
            seen[4] = trace.after_epoch[0]
        assert seen[:7] == [pair[rank // 2] for pair in expected]


def test_unequal_nodes_weigh_by_their_ranks(run_oracle):
    traces = run_oracle(lambda: PeriodicAveraging(2), nodes=[[0, 1, 2], [3]], steps_per_epoch=2)
    assert [trace.after_step[1] for trace in traces] == [3.0] * 4


def test_averaging_every_step_equals_all_reduce_with_plain_sgd(run_oracle):
    periodic = run_oracle(lambda: PeriodicAveraging(1))
    baseline = run_oracle(AllReduce)
    assert [t.after_step for t in periodic] == [t.after_step for t in baseline]
    assert baseline[0].after_step[:4] == [2, 3, 3.5, 3.75]


@pytest.mark.parametrize(
    ("sync_every", "weights", "expected"),
    [
        (1, (1, 3, 2, 2), [(2.125, 2.125), (3.1875, 3.1875), (3.71875, 3.71875)]),
        (2, (1, 3, 2, 2), [(0.75, 3.5), (3.1875, 3.1875), (2.34375, 5.09375), (3.984375, 3.984375)]),
        (2, (1, 1, 2, 4), [(0.5, 4), (4.6875, 4.6875)]),
    ],
)
def test_rank_weights_reach_gradients_and_averages(run_oracle, sync_every, weights, expected):
    traces = run_oracle(lambda: PeriodicAveraging(sync_every), weights=weights, steps_per_epoch=len(expected))
    for rank, trace in enumerate(traces):
        assert trace.after_step == [pair[rank // 2] for pair in expected]


def test_an_epoch_synchronizes_as_often_as_in_the_paper(run_oracle):
    for steps, every in [(5, 2), (6, 2), (7, 3), (3, 10)]:
        trace = run_oracle(lambda: PeriodicAveraging(every), epochs=2, steps_per_epoch=steps)[0]  # noqa: B023
        assert trace.scheme.state.synchronizations == 2 * (steps // every + (steps % every != 0))


def test_a_run_that_ends_between_syncs_ends_on_the_average(run_oracle):
    traces = run_oracle(lambda: PeriodicAveraging(4, at_epoch_end=False), steps_per_epoch=6)
    assert len({trace.finished for trace in traces}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": None, "at_epoch_end": False}, "at_epoch_end=True"),
        ({"order": "sideways"}, "order='sideways'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PeriodicAveraging(**arguments)
