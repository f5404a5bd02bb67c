"""The optimizer's state is averaged in the form that the wire gives it, and second moments stay positive."""

from __future__ import annotations

from functools import partial

import harness
import pytest
import torch
from harness import on_nodes, on_ranks, steps
from torch.optim import SGD, Adam

from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import PeriodicAveraging
from lightning_hiercomm.schemes.optimizer_average import OptimizerStateMean

TWO = ((0,), (1,))
LOSSY = ["bfloat16", "float16", "int8", "int4", "sparse2"]


class Own:
    """One rank's parameter, whose state a test sets by hand."""

    def __init__(self, topology, wire, numel=2):
        self.x = torch.nn.Parameter(torch.zeros(numel))
        self.optimizer = SGD([self.x], lr=0.1)
        self.replica = Replica([self.x])
        self.mean = OptimizerStateMean(self.optimizer, topology, Wire(wire))
        self.topology, self.rank = topology, topology.rank

    def averaged(self, **state):
        """Set the state, average it, and return what it is then."""
        held = self.optimizer.state[self.x]
        for name, values in state.items():
            values = torch.as_tensor(values, dtype=torch.float32)
            held.setdefault(name, torch.empty_like(values)).copy_(values)
        self.mean(self.replica, self.topology.new_round())
        return {name: values.tolist() for name, values in held.items()}


def test_momentum_follows_the_table_with_int4_and_error_feedback():
    def work(topology):
        own = Own(topology, "int4")
        # as it is: the mean of 2, 4 and of -1, 3
        first = own.averaged(momentum_buffer=[2.0 + 2 * own.rank, -1.0 + 4 * own.rank])
        # differences of 7 and 1.4 on rank 0; half of them, 3.5 and 0.7, in sevenths of 3.5: 3.5 and 0.5. 0.2 is left
        second = own.averaged(momentum_buffer=[3.0 + 7.0 * (1 - own.rank), 1.0 + 1.4 * (1 - own.rank)])
        # nothing has changed but the largest: 3.5 and the 0.2 that was left, which is nearer to 0; then 0.4 is sent
        third = own.averaged(momentum_buffer=[6.5 + 7.0 * (1 - own.rank), 1.5 + 0.4 * (1 - own.rank)])
        return first, second, third

    found = on_ranks(work, TWO)
    assert found[0] == found[1]
    assert [each["momentum_buffer"] for each in found[0]] == [[3.0, 1.0], [6.5, 1.5], [10.0, 2.0]]


def test_second_moments_travel_as_roots_and_fall_by_half_at_most():
    def work(topology):
        own = Own(topology, "int4")
        first = own.averaged(exp_avg_sq=[4.0, 0.0625])
        # roots of 9 and 0.25, so halves of differences 7 and -0.25: in units of 0.5 these are 7 and -0.25, so 0
        second = own.averaged(exp_avg_sq=[81.0, 0.0])
        # from 9 and 0.25 to 9 and 0: one difference alone, which its own scale holds, but half of 0.25 is the least
        third = own.averaged(exp_avg_sq=[81.0, 0.0])
        return first, second, third

    for first, second, third in on_ranks(work, TWO):
        assert first["exp_avg_sq"] == [4.0, 0.0625]
        assert second["exp_avg_sq"] == [81.0, 0.0625]
        assert third["exp_avg_sq"] == [81.0, 0.015625]


@pytest.mark.parametrize("wire", LOSSY)
@pytest.mark.parametrize("nodes", [TWO, ((0, 1), (2, 3)), ((0,), (1,), (2,))])
def test_moments_of_adam_are_equal_and_positive_on_all_nodes(wire, nodes):
    scheme = harness.with_policy(PeriodicAveraging(2), average_optimizer_state=True)

    def work(rank):
        found = []
        for step in range(12):
            scale = torch.logspace(-6, 1, 500) * (1 + rank.topology.node)
            rank.train(lambda x: torch.where((torch.arange(500) + step) % 3 > 0, scale, -scale))  # noqa: B023
            if step % 2:
                state = rank.optimizer.state[rank.parameters[0]]
                found.append((state["exp_avg"].clone(), state["exp_avg_sq"].clone()))
        return found

    training = {"shapes": [(500,)], "wire": wire, "inner": partial(Adam, lr=1e-3, betas=(0.9, 0.99))}
    exact = on_nodes(work, scheme, nodes, **{**training, "wire": None})
    found = on_nodes(work, scheme, nodes, **training)
    for average in range(6):
        means = [each[average] for each in found]
        assert all(torch.equal(first, means[0][0]) and torch.equal(second, means[0][1]) for first, second in means)
        assert (means[0][1] > 0).all()
        ratio = means[0][1] / exact[0][average][1]
        assert (ratio < 8).all()
        assert (ratio > 1 / 8).all()


def test_optimizer_state_costs_the_bytes_of_its_codec():
    def sent(wire, inner, state):
        scheme = harness.with_policy(PeriodicAveraging(1, at_epoch_end=False), average_optimizer_state=state)

        def work(rank):
            steps(1)(rank)
            before = rank.meter.bytes["inter"]
            steps(4)(rank)
            return rank.meter.bytes["inter"] - before

        return on_nodes(work, scheme, TWO, shapes=[(2**14,)], targets=None, wire=wire, inner=inner)[0]

    def of_state(wire, inner):
        return sent(wire, inner, True) - sent(wire, inner, False)

    momentum, adam = partial(SGD, lr=0.1, momentum=0.9), partial(Adam, lr=0.1)
    whole = of_state(None, momentum)
    assert whole >= 4 * 4 * 2**14
    for inner, tensors in ((momentum, 1), (adam, 2)):
        for wire, share in (("bfloat16", 2), ("int8", 3.8), ("int4", 7.5), ("sparse2", 7.5)):
            assert tensors * whole / of_state(wire, inner) >= share * 0.99, wire


def test_a_tensor_that_becomes_negative_is_no_second_moment_from_then_on():
    def work(topology):
        own = Own(topology, "int8")
        found = [own.averaged(unknown=[1.0, 2.0])]
        found += [own.averaged(unknown=[-1.0 - own.rank, 2.0])]
        found += [own.averaged(unknown=[1.0, 2.0]), own.averaged(unknown=[1.0, -2.0])]
        return [each["unknown"] for each in found]

    for found in on_ranks(work, TWO):
        assert found[1] == [-1.5, 2.0]  # as it is
        assert found[2] == pytest.approx([1.0, 2.0], abs=0.02)
        assert found[3] == pytest.approx([1.0, -2.0], abs=0.05)


@pytest.mark.parametrize("name", ["momentum_buffer", "exp_avg", "grad_avg"])
def test_a_first_moment_without_negative_elements_is_averaged_itself(name):
    def work(topology):
        own = Own(topology, "bfloat16")
        own.averaged(**{name: [1.0, 4.0]})
        return own.averaged(**{name: [1.0 + 8.0 * own.rank, 4.0]})[name]

    # the mean of the roots would be 2, and its square 4
    assert on_ranks(work, TWO) == [[5.0, 4.0], [5.0, 4.0]]
