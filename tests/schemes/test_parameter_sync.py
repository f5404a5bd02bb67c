"""Compositions of five components; their equations are in test_calculations.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import TWO_BY_TWO, place, steps
from torch.optim import Adam

from lightning_hiercomm.schemes import Every, Graph, OuterOptimizer, ParameterSync, RandomPermutation, Staggered

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

SEVENS = {"a": 7, "b": 5, "c": 11}
FOUR = ((0,), (1,), (2,), (3,))


def test_a_graph_with_unequal_in_and_out_degrees_is_refused(on_nodes):
    class Star(Graph):
        def send_to(self, size, step, fragment):
            return [[1, 2, 3], [0], [0], [0]][:size]

    class Lopsided(Graph):
        def send_to(self, size, step, fragment):
            return [[1], [0, 2], [0, 3], [2]]

    on_nodes(steps(3), ParameterSync(2, reducer=Star()), FOUR, shapes=SEVENS)  # everyone sends as much as it receives
    with pytest.raises(ValueError, match="lets nodes receive more than they send"):
        on_nodes(steps(3), ParameterSync(2, reducer=Lopsided()), FOUR, shapes=SEVENS)


@pytest.mark.parametrize(
    "scheme",
    [
        ParameterSync(Staggered(6), 2, staleness=2),
        ParameterSync(Staggered(6), ["c", "a"], reducer="leader", merge="eq1", staleness=1),
        ParameterSync(4, reducer="leader", merge="delta", staleness=3),
        ParameterSync(2, 2, reducer=RandomPermutation()),
        ParameterSync(4, reducer=RandomPermutation(), merge=OuterOptimizer(partial(Adam, lr=0.1)), staleness=1),
        ParameterSync(Every(3, of="epoch"), merge=OuterOptimizer(keep_local=0.5)),
    ],
    ids=repr,
)
def test_nodes_go_on_from_a_plain_state(on_nodes, scheme):
    def saving(rank):
        state = steps(9)(rank).scheme.state_dict(shared=True)
        rank.scheme.synchronize()
        return state, rank.values

    saved, values = on_nodes(saving, scheme, TWO_BY_TWO, shapes=SEVENS, targets=None)[0]

    def resuming(rank):
        torch.nn.utils.vector_to_parameters(values.to(place.device, copy=True), list(rank.module.parameters()))
        rank.scheme.load_state_dict(saved)
        assert torch.equal(rank.averaged(), values)
        assert steps(4)(rank).scheme.state.steps == 13
        return rank.averaged()

    averaged = on_nodes(resuming, scheme, ((0,), (1, 2), (3,)), shapes=SEVENS, targets=None)
    assert all(torch.equal(one, averaged[0]) for one in averaged)
    assert not torch.equal(averaged[0], values)


def test_an_exchange_that_overlaps_the_next_one_is_refused(on_nodes):
    with pytest.raises(ValueError, match=r"staleness=3 must be at most 2 for Staggered\(period=6\) with 2 fragments"):
        on_nodes(steps(1), ParameterSync(Staggered(6), 2, staleness=3), ((0,), (1,)), shapes=SEVENS)
    with pytest.raises(ValueError, match=r"staleness=5 must be at most 4 for Every\(period=4"):
        on_nodes(steps(1), ParameterSync(4, staleness=5), ((0,), (1,)), shapes=SEVENS)


def test_weights_that_change_while_an_exchange_leaves_do_not_move_anybody(on_nodes):
    # no rank trains, so parameters stay as they are, whatever the weights
    def work(rank):
        for step in range(12):
            rank.train(0.0)
            rank.topology.set_weights([1.0 + step % 3, 2.0, 1.0, 3.0 - step % 2])
        return rank.trace

    scheme = ParameterSync(3, staleness=2)
    arguments = {"shapes": [(5,)], "start": 2.0, "dtype": torch.float64, "wire": "bfloat16", "bucket_bytes": 16}
    for trace in on_nodes(work, scheme, TWO_BY_TWO, **arguments):
        torch.testing.assert_close(torch.tensor(trace), torch.full((12, 5), 2.0), rtol=0, atol=1e-14)
