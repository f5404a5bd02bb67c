"""Programs that replace an optimizer's step by code of their own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import Rank, on_nodes, place

from lightning_hiercomm.schemes import Gossip, Graph, PeriodicAveraging
from lightning_hiercomm.schemes.in_place_of_step import in_place_of_step

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

RHO = 0.5


class SAM(torch.optim.SGD):
    """Goes up by ``RHO``, takes the gradient there, and goes down from where it was."""

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "SAM needs a closure"
        closure = torch.enable_grad()(closure)
        loss = closure()
        up = [(p, RHO * p.grad.sign()) for group in self.param_groups for p in group["params"]]
        for parameter, way in up:
            parameter.add_(way)
        closure()
        for parameter, way in up:
            parameter.sub_(way)
        super().step()
        return loss


class Impatient(SAM):
    """As most people write it: goes by the gradients that are there, and evaluates once, from none."""

    @torch.no_grad()
    def step(self, closure=None):
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        torch.optim.SGD.step(self)
        return loss


def closure_of(parameter, optimizer, target, calls):
    def closure():
        calls.append(parameter.item())
        optimizer.zero_grad()
        loss = 0.5 * (parameter - target).square().sum()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize(
    ("kind", "evaluated", "left"),
    [(torch.optim.SGD, [4.0], 8.0), (SAM, [4.0, 10.5], 4.75), (Impatient, [4.0, 10.0], 5.0)],
)
def test_closure_runs_again_only_without_gradients(kind, evaluated, left):
    parameter = torch.nn.Parameter(torch.full((1,), 4.0, device=place.device))
    optimizer, calls = kind([parameter], lr=0.5), []

    def update(step):
        parameter.data.fill_(10.0)
        parameter.grad.mul_(1.0)
        step()

    with in_place_of_step(optimizer, update):
        optimizer.step(closure_of(parameter, optimizer, 0.0, calls))
    assert calls == evaluated
    assert parameter.item() == left


def train(rank: Rank, target: float, number: int) -> list[float]:
    """Steps of SAM; where it has evaluated the loss, twice in each."""
    calls: list[float] = []
    closure = closure_of(rank.parameters[0], rank.optimizer, target, calls)
    for _ in range(number):
        rank.scheme.step(lambda: rank.optimizer.step(closure))
    return calls


@pytest.mark.parametrize("scheme", [PeriodicAveraging(1, order="before_step"), Gossip(overlap=True)], ids=repr)
def test_second_closure_evaluation_follows_the_sync(scheme):
    def work(rank: Rank) -> float:
        train(rank, rank.rank + 1.0, 2)
        return rank.values.item()

    # from 0: up by -0.5, down from 0 by 0.5 (-0.5 - target). Then from the mean, 1, likewise
    assert on_nodes(work, scheme, inner=partial(SAM, lr=0.5)) == [1.25, 1.75]


class Unequal(Graph):
    """0 -> {1, 2}, 1 -> {2}, 2 -> {0}: push-sum weights (5/6, 5/6, 4/3) after one step."""

    def send_to(self, size, step, fragment):
        return [[1, 2], [2], [0]]


def test_second_closure_evaluation_sees_debiased_push_sum_values():
    chosen = {"inner": partial(SAM, lr=0.5), "dtype": torch.float64}
    work = partial(train, target=8.0, number=3)
    for calls in on_nodes(work, Gossip(Unequal(), fragments=1), ((0,), (1,), (2,)), **chosen):
        # gradients point down, so it looks half below where it has looked first
        assert calls[1::2] == pytest.approx([seen - 0.5 for seen in calls[::2]])
