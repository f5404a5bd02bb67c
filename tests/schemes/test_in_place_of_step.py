"""Programs that replace an optimizer's step by code of their own."""

from __future__ import annotations

import pytest
import torch
from harness import on_ranks, place

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes import Gossip, Graph, PeriodicAveraging
from lightning_hiercomm.schemes.base import Context
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


@pytest.mark.parametrize("scheme", [PeriodicAveraging(1, order="before_step"), Gossip(overlap=True)])
def test_second_closure_evaluation_follows_the_sync(scheme):
    def body(topology: Topology) -> float:
        parameter = torch.nn.Parameter(torch.zeros(1, device=place.device))
        optimizer, calls = SAM([parameter], lr=0.5), []
        running = scheme.build(Context(Replica([parameter]), topology, optimizer))
        try:
            running.begin_run(1, None)
            running.begin_epoch(0, dict)
            for _ in range(2):
                running.step(lambda: optimizer.step(closure_of(parameter, optimizer, topology.rank + 1.0, calls)))
            return parameter.item()
        finally:
            running.close()

    # from 0: up by -0.5, down from 0 by 0.5 (-0.5 - target). Then from the mean, 1, likewise
    assert on_ranks(body, [[0], [1]]) == [1.25, 1.75]


class Unequal(Graph):
    """0 -> {1, 2}, 1 -> {2}, 2 -> {0}: push-sum weights (5/6, 5/6, 4/3) after one step."""

    def send_to(self, size, step, fragment):
        return [[1, 2], [2], [0]]


def test_second_closure_evaluation_sees_debiased_push_sum_values():
    looked: dict[int, list[float]] = {}

    def body(topology: Topology) -> None:
        parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64, device=place.device))
        optimizer, calls = SAM([parameter], lr=0.5), looked.setdefault(topology.rank, [])
        running = Gossip(Unequal(), fragments=1).build(Context(Replica([parameter]), topology, optimizer))
        try:
            running.begin_run(1, None)
            running.begin_epoch(0, dict)
            for _ in range(3):
                running.step(lambda: optimizer.step(closure_of(parameter, optimizer, 8.0, calls)))
        finally:
            running.close()

    on_ranks(body, [[0], [1], [2]])
    for calls in looked.values():  # gradients point down, so it looks half below where it has looked first
        assert calls[1::2] == pytest.approx([seen - 0.5 for seen in calls[::2]])
