"""Parameters that change without a counted step, on threads and without a Trainer."""

from __future__ import annotations

import pytest
import torch
from harness import on_ranks, place
from torch import nn

from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import AllReduce, Gossip, PeriodicAveraging, StepsDelay

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

TWO_NODES = [[0], [1]]


class Loop:
    """A run of two layers; only the first has an optimizer."""

    def __init__(self, topology: Topology, scheme=None, both=False):
        self.module = nn.ModuleDict({"first": nn.Linear(1, 1), "second": nn.Linear(1, 1)}).to(place.device)
        self.first, self.second = self.module["first"], self.module["second"]
        trained = self.module.parameters() if both else self.first.parameters()
        self.optimizer = torch.optim.SGD(trained, lr=0.1)
        self.others = {}
        self.run = TrainingRun(scheme or PeriodicAveraging(2), Replicas(self.module, [self.optimizer]), topology)
        self.run.begin(epochs=None, steps=None)
        self.run.begin_epoch(0, dict)

    def backward(self, counts=True):
        self.module.zero_grad()
        loss = sum(layer(torch.ones(1, 1, device=place.device)).sum() for layer in (self.first, self.second))
        if counts:
            with self.run.backward():
                loss.backward()
        else:
            loss.backward()

    def step(self):
        self.run.step(self.optimizer, self.optimizer.step)

    def step_another(self, layer):
        other = self.others.setdefault(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        other.step()


def batches_until_the_error(batch, batches=12, **arguments):
    """How many batches a run goes through until it says which parameters change; None if it never does."""

    def body(topology):
        loop = Loop(topology, **arguments)
        try:
            for number in range(batches):
                batch(loop, number)
                try:
                    loop.run.end_batch()
                except RuntimeError as error:
                    return number + 1, str(error)
            return None, ""
        finally:
            loop.run.close(timeout=5.0)

    (ended, other) = on_ranks(body, TWO_NODES)
    assert ended == other
    return ended


@torch.no_grad()
def by_hand(loop):
    for p in loop.first.parameters():
        p -= 0.1 * p.grad


def by_data(loop):
    for p in loop.first.parameters():
        p.data -= 0.1 * p.grad


def by_new_data(loop):
    for p in loop.first.parameters():
        p.data = p.data - 0.1 * p.grad


def by_new_parameters(loop):
    loop.first.weight = nn.Parameter(loop.first.weight.detach() - 0.1)


def by_state(loop):
    loop.first.load_state_dict({name: value - 0.1 for name, value in loop.first.state_dict().items()})


@pytest.mark.parametrize(
    "write", [by_hand, by_data, by_new_data, by_new_parameters, by_state, lambda loop: loop.step_another(loop.first)]
)
def test_the_second_change_without_a_step_ends_the_run(write):
    def batch(loop, number):
        loop.backward()
        write(loop)

    batches, said = batches_until_the_error(batch)
    assert batches == 2
    assert said.startswith("first.weight")
    assert "in which the step() of SGD was not called" in said
    for scheme in (Gossip(), StepsDelay(2, 2)):
        assert batches_until_the_error(batch, scheme=scheme)[0] == 2
    assert batches_until_the_error(batch, scheme=AllReduce()) == (None, "")


def test_changes_after_counted_steps_end_the_run():
    def batch(loop, number):
        loop.backward()
        loop.step() if number < 4 else by_hand(loop)

    assert batches_until_the_error(batch)[0] == 8


def test_changes_between_counted_steps_do_not_end_the_run():
    def batch(loop, number):
        loop.backward()
        by_hand(loop)
        if number % 2:
            loop.step()

    assert batches_until_the_error(batch) == (None, "")


@torch.no_grad()
def clamp(loop):
    for p in loop.first.parameters():
        p.clamp_(-0.1, 0.1)


def test_writing_the_same_values_again_does_not_end_the_run():
    def batch(loop, number):
        loop.backward()
        clamp(loop)

    assert batches_until_the_error(batch, batches=40) == (None, "")


def test_an_optimizer_outside_the_run_ends_it():
    def batch(loop, number):
        loop.backward()
        loop.step()
        loop.step_another(loop.second)

    batches, said = batches_until_the_error(batch)
    assert batches == 2
    assert said.startswith("second.weight, second.bias changed in several batches, but SGD trains them")
    assert "Return their optimizer from configure_optimizers" in said


def test_an_optimizer_with_a_backward_pass_of_its_own_does_not_end_the_run():
    def batch(loop, number):
        loop.backward(counts=False)
        loop.step_another(loop.second)
        loop.backward()
        loop.step()

    assert batches_until_the_error(batch) == (None, "")


def test_a_teacher_that_gets_gradients_does_not_end_the_run():
    def batch(loop, number):
        loop.backward()
        loop.step()
        with torch.no_grad():
            for teacher, student in zip(loop.second.parameters(), loop.first.parameters(), strict=True):
                teacher.lerp_(student, 0.1)

    assert batches_until_the_error(batch) == (None, "")


def test_a_loop_without_known_batches_may_step_back_inside():
    def inner_loop(loop, number):
        loop.run.knows_batches = False
        loop.backward()
        loop.step_another(loop.first)
        if number % 6 == 5:
            loop.step()

    assert batches_until_the_error(inner_loop, batches=30) == (None, "")

    def by_hand_only(loop, number):
        loop.run.knows_batches = False
        loop.backward()
        by_hand(loop)

    assert batches_until_the_error(by_hand_only)[0] == 8


def test_changes_that_leave_no_trace_are_found_at_the_ends_of_epochs():
    def body(topology):
        loop = Loop(topology)
        try:
            for epoch in range(6):
                for _ in range(5):
                    loop.backward()
                    if epoch == 0:
                        loop.step()
                    elif epoch > 1:
                        by_data(loop)
                    loop.run.end_batch()
                try:
                    loop.run.end_epoch()
                except RuntimeError as error:
                    return epoch, "first.weight, first.bias changed" in str(error)
                loop.run.begin_epoch(epoch + 1, dict)
            return None
        finally:
            loop.run.close(timeout=5.0)

    assert on_ranks(body, TWO_NODES) == [(3, True)] * 2


def test_optimizers_inside_the_backward_pass_end_a_run_without_others():
    def body(topology):
        layer = nn.Linear(1, 1).to(place.device)
        inside = {p: torch.optim.SGD([p], lr=0.1) for p in layer.parameters()}

        def step(p):
            inside[p].step()
            inside[p].zero_grad()

        for p in layer.parameters():
            p.register_post_accumulate_grad_hook(step)
        nothing = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        nothing.param_groups.clear()
        run = TrainingRun(PeriodicAveraging(2), Replicas(layer, [nothing]), topology)
        try:
            run.begin(epochs=None, steps=None)
            for batch in range(2):
                with run.backward():
                    layer(torch.ones(1, 1, device=place.device)).sum().backward()
                if batch == 0:
                    run.end_batch()
            with pytest.raises(RuntimeError, match="weight, bias changed in several batches, but SGD trains them"):
                run.end_batch()
        finally:
            run.close(timeout=5.0)
        return True

    assert on_ranks(body, TWO_NODES) == [True, True]
