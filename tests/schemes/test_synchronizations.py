"""Every scheme counts how often nodes have averaged, each in its own way."""

from __future__ import annotations

import pytest

from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, StepsDelay

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one


@pytest.mark.parametrize(
    ("scheme", "synchronizations"),
    [
        (AllReduce(), 12),  # on gradients
        (PeriodicAveraging(4), 3),
        (DASO(4, 1, warmup=0, cooldown=0), 3),  # merged after steps 2, 6 and 10
        (DASO(4, 1, warmup=5, cooldown=0), 5 + 1),  # cycles from step 6; merged after 10
        (StepsDelay(4, 4), 4 + 1),  # pulled in steps 8 and 12; what was pulled last has not arrived
        (DiLoCo(4), 3),
        (DiLoCo(4, fragments=2), 6),  # half of the model each time
        (Gossip(), 12),
        (Gossip(overlap=True), 11),  # the last exchange is in flight
    ],
    ids=repr,
)
def test_synchronizations_of_twelve_steps(on_nodes, scheme, synchronizations):
    def work(rank):
        for _ in range(12):
            rank.train()
        return rank.scheme.state.synchronizations

    assert on_nodes(work, scheme, ((0,), (1,)), shapes={"a": 7, "b": 5}) == [synchronizations] * 2
