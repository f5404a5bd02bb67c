"""PeriodicAveraging, against the numbers worked by hand from eDNNcomm's Eq. 8 and 9."""

from __future__ import annotations

import pytest

from lightning_hiercomm.schemes import PeriodicAveraging

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


def test_an_epoch_synchronizes_as_often_as_in_the_paper(run_oracle):
    for steps, every in [(5, 2), (6, 2), (7, 3), (3, 10)]:
        trace = run_oracle(lambda: PeriodicAveraging(every), epochs=2, steps_per_epoch=steps)[0]  # noqa: B023
        assert trace.scheme.state.synchronizations == 2 * (steps // every + (steps % every != 0))
