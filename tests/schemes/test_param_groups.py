"""What an optimizer keeps in its param groups is its own, and what anyone else changes there reaches all its parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import Rank, on_nodes, reloaded, run_to_end

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import DiLoCo, StepsDelay

TWO = ((0,), (1,))
TWO_OF_TWO = ((0, 1), (2, 3))
SHAPES = {"a": (3, 2), "b": (5,), "c": (1,)}
WARM_UP = StepsDelay(2, warmup_steps=20, local_update="sgd")


class CountsInGroup(torch.optim.Optimizer):
    """Adam that counts in ``group["step"]``, and keeps a value that adapts in ``group["scale"]``."""

    def __init__(self, parameters, lr=0.1, momentum=0.9):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "scale": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["scale"] = group["scale"] * (0.9 if group["step"] % 2 else 1.2)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 1 - group["momentum"])
                state["square"].lerp_(p.grad.square(), 0.01)
                mean = state["mean"] / (1 - group["momentum"] ** group["step"])
                square = state["square"] / (1 - 0.99 ** group["step"])
                p.sub_(mean / (square.sqrt() + 1e-8), alpha=group["lr"] * group["scale"])
        return loss


def alone(train: Callable[[torch.optim.Optimizer, Callable[[], None]], None], **arguments: Any) -> list[float]:
    """The values of one process whose optimizer steps with the gradients of all ranks."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    optimizer = CountsInGroup(parameters, **arguments)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = parameter.detach() - 4.0  # the mean of the ranks' targets
        optimizer.step()

    train(optimizer, step)
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters]).tolist()


def steps(optimizer: Any, step: Callable[[], object]) -> None:
    for _ in range(6):
        step()


def schedules(optimizer: Any, step: Callable[[], object]) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for at in range(6):
        if at == 3:
            optimizer.param_groups[0]["momentum"] = 0.5
        step()
        scheduler.step()


def schedules_in_hooks(optimizer: Any, step: Callable[[], object]) -> None:
    def shrink(own: Any, *_: object) -> None:
        own.param_groups[0]["lr"] *= 0.8

    def grow(own: Any, *_: object) -> None:
        own.param_groups[0]["lr"] *= 1.1
        own.param_groups[0]["momentum"] = 0.7

    optimizer.register_step_pre_hook(shrink)
    optimizer.register_step_post_hook(grow)
    steps(optimizer, step)


def restarts(optimizer: Any, step: Callable[[], object]) -> None:
    for at in range(6):
        if at == 4:
            optimizer.param_groups[0].update(step=0, scale=1.0)
        step()


@pytest.mark.parametrize("program", [steps, schedules, schedules_in_hooks, restarts])
def test_warm_up_equals_one_process_for_an_optimizer_that_counts_in_its_group(program):
    runs = run_to_end(
        lambda rank: (program(rank.optimizer, rank.train), rank)[1],
        WARM_UP,
        TWO_OF_TWO,
        shapes=SHAPES,
        inner=CountsInGroup,
        bucket_bytes=16,
    )
    expected = alone(program)
    for run in runs:
        assert run.values.tolist() == pytest.approx(expected, abs=1e-6)
        assert run.optimizer.param_groups[0]["step"] == (2 if program is restarts else 6)


def test_a_skipped_step_counts_on_the_server_only(on_nodes):
    """Rank 0's gradient scaler skips a step, in which the server still steps with the other node's gradient."""

    def work(rank: Rank) -> tuple[dict[str, Any], int]:
        for at in range(4):
            rank.train(skip=(rank.rank, at) == (0, 1))
        return rank.scheme.optimizer_state()["param_groups"][0], rank.optimizer.param_groups[0]["step"]

    (first, own), (second, other) = on_nodes(work, WARM_UP, TWO, shapes=SHAPES, inner=CountsInGroup)
    assert first == second
    assert (first["step"], own, other) == (4, 3, 4)


@pytest.mark.parametrize("nodes", [TWO, ((0, 1), (2,))], ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_steps_delay_resumes_what_its_optimizer_keeps_in_its_group(nodes, exact):
    targets = (4.0, 4.0, 4.0)
    saved: dict[int, Any] = {}

    def scheduler_of(rank: Rank) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(rank.optimizer, lambda step: 1 / (1 + step))

    def first(rank: Rank) -> list[Any]:
        scheduler = scheduler_of(rank)
        for at in range(6):
            if at == 3:
                optimizer = rank.scheme.optimizer_state()
                state = rank.state() if exact else {"values": list(map(torch.Tensor.clone, rank.parameters))}
                saved[rank.rank] = reloaded({**state, "optimizer": rank.optimizer.state_dict() if exact else optimizer})
                saved[rank.rank]["scheduler"] = scheduler.state_dict()
            rank.train()
            scheduler.step()
        return rank.trace[3:]

    def resumed(rank: Rank) -> list[Any]:
        state = saved[rank.rank]
        scheduler = scheduler_of(rank)
        if exact:
            rank.load(state)
        else:
            with torch.no_grad():
                for parameter, values in zip(rank.parameters, state["values"], strict=True):
                    parameter.copy_(values)
            rank.scheme.follow(Replica(rank.parameters))
            rank.optimizer.load_state_dict(state["optimizer"])
            rank.scheme.load_state_dict({**rank.scheme.state_dict(shared=True), "steps": 3})
        rank.scheme.begin_run(1, None)
        scheduler.load_state_dict(state["scheduler"])
        for _ in range(3):
            rank.train()
            scheduler.step()
        return rank.trace

    arguments: dict[str, Any] = {"shapes": SHAPES, "inner": CountsInGroup, "targets": targets}
    whole = on_nodes(first, WARM_UP, nodes, **arguments)
    for expected, trace in zip(whole, on_nodes(resumed, WARM_UP, nodes, **arguments), strict=True):
        assert trace == expected


def test_parameters_that_join_later_keep_the_counts_of_their_group():
    def work(rank: Rank) -> dict[str, Any]:
        for _ in range(3):
            rank.train()
        rank.scheme.synchronize()
        rank.scheme.follow(Replica(rank.parameters))
        rank.train()
        return rank.scheme.optimizer_state()["param_groups"][0]

    for group in on_nodes(work, WARM_UP, TWO, shapes=SHAPES, inner=CountsInGroup):
        assert group["step"] == 4


# ---- outer optimizers ------------------------------------------------------------------------------------------------


def outer_alone(periods: int) -> list[float]:
    """Inner SGD(0.1) towards 4, two steps a period, and the outer optimizer of all parameters at once."""
    x = torch.nn.Parameter(torch.ones(12))
    optimizer = CountsInGroup([x])
    for _ in range(periods):
        inner = x.detach().clone()
        for _ in range(2):
            inner -= 0.1 * (inner - 4.0)
        x.grad = x.detach() - inner
        optimizer.step()
    return x.tolist()


@pytest.mark.parametrize("bucket_bytes", [16, 2**20])
@pytest.mark.parametrize("nodes", [TWO, TWO_OF_TWO, ((0, 1), (2,))], ids=str)
def test_outer_counts_are_those_of_one_optimizer_whatever_the_buckets(on_nodes, bucket_bytes, nodes):
    def work(rank: Rank) -> list[float]:
        for _ in range(6):
            rank.train(lambda x: x - 4.0)
        return rank.values.tolist()

    for values in on_nodes(work, DiLoCo(2, CountsInGroup), nodes, shapes=SHAPES, bucket_bytes=bucket_bytes):
        assert values == pytest.approx(outer_alone(3), abs=1e-5)


class DecaysWithoutGradient(torch.optim.SGD):
    """Shrinks all of its parameters in each step, with or without gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.mul_(0.5)
        return super().step(closure)


def test_a_bucket_is_stepped_alone(on_nodes):
    def work(rank: Rank) -> list[float]:
        for _ in range(2):
            rank.train(lambda x: x - 4.0)
        return rank.values.tolist()

    outer = partial(DecaysWithoutGradient, lr=1.0)
    expected = 0.5 + 0.1 * 3.0 + 0.1 * 2.7  # half of 1, and the two inner steps
    for values in on_nodes(work, DiLoCo(2, outer), TWO_OF_TWO, shapes=SHAPES, bucket_bytes=16):
        assert values == pytest.approx([expected] * 12, abs=1e-5)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)


@pytest.mark.parametrize("scheduler", [None, cosine])
@pytest.mark.parametrize("fragments", [1, 2])
def test_an_exact_resume_restores_what_the_outer_optimizer_keeps_in_its_group(on_nodes, scheduler, fragments):
    scheme = DiLoCo(4, CountsInGroup, fragments=fragments, outer_scheduler=scheduler)
    states: dict[int, Any] = {}

    def saving(rank: Rank) -> list[Any]:
        for at in range(14):
            if at == 7:
                states[rank.rank] = rank.state()
            rank.train(lambda x: x - rank.rank)
        return rank.trace[7:]

    def resuming(rank: Rank) -> list[Any]:
        rank.load(states[rank.rank])
        for _ in range(7):
            rank.train(lambda x: x - rank.rank)
        return rank.trace

    arguments: dict[str, Any] = {"shapes": SHAPES, "bucket_bytes": 16}
    whole = on_nodes(saving, scheme, TWO_OF_TWO, **arguments)
    assert on_nodes(resuming, scheme, TWO_OF_TWO, **arguments) == whole


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_plain_state_restores_what_the_outer_optimizer_keeps_on_other_nodes(on_nodes, fragments):
    scheme = DiLoCo(4, CountsInGroup, fragments=fragments)
    arguments: dict[str, Any] = {"shapes": SHAPES, "bucket_bytes": 16, "dtype": torch.float64}

    def train(rank: Rank, number: int) -> list[Any]:
        for _ in range(number):
            rank.train(lambda x: x - 3.0)
        return rank.trace

    def saving(rank: Rank) -> Any:
        train(rank, 7)
        return reloaded({"scheme": rank.scheme.state_dict(shared=True), "values": rank.scheme.replica.snapshot()})

    saved = on_nodes(saving, scheme, TWO_OF_TWO, **arguments)[0]

    def resuming(rank: Rank) -> list[Any]:
        rank.scheme.replica.restore(saved["values"])
        rank.scheme.load_state_dict(saved["scheme"])
        assert repr(reloaded(rank.scheme.state_dict(shared=True))) == repr(saved["scheme"])
        return train(rank, 9)

    (expected, *_) = on_nodes(lambda rank: train(rank, 16), scheme, TWO_OF_TWO, **arguments)
    for trace in on_nodes(resuming, scheme, ((0,), (1,), (2,)), **arguments):
        for values, right in zip(trace, expected[7:], strict=True):
            assert values == pytest.approx(right, abs=1e-12)
