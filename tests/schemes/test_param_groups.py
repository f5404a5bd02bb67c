"""What a program changes in param groups reaches all parts of an optimizer; an outer one may keep numbers there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import Rank, on_nodes, reloaded, run_to_end, steps

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import DiLoCo, StepsDelay

TWO = ((0,), (1,))
TWO_OF_TWO = ((0, 1), (2, 3))
SHAPES = {"a": (3, 2), "b": (5,), "c": (1,)}
WARM_UP = StepsDelay(2, warmup_steps=20)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


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


def alone(train: Callable[[torch.optim.Optimizer, Callable[[], None]], None]) -> list[float]:
    """The values of one process whose optimizer steps with the gradients of all ranks."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    optimizer = MOMENTUM(parameters)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = parameter.detach() - 4.0  # the mean of the ranks' targets
        optimizer.step()

    train(optimizer, step)
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters]).tolist()


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
    for _ in range(6):
        step()


@pytest.mark.parametrize("program", [schedules, schedules_in_hooks])
def test_a_server_steps_with_what_a_program_sets_in_param_groups(program):
    runs = run_to_end(
        lambda rank: (program(rank.optimizer, rank.train), rank)[1],
        WARM_UP,
        TWO_OF_TWO,
        shapes=SHAPES,
        inner=MOMENTUM,
        bucket_bytes=16,
    )
    expected = alone(program)
    for run in runs:
        assert run.values.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("nodes", [TWO, ((0, 1), (2,))], ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_steps_delay_resumes_together_with_a_scheduler(nodes, exact):
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

    arguments: dict[str, Any] = {"shapes": SHAPES, "inner": MOMENTUM, "targets": targets}
    whole = on_nodes(first, WARM_UP, nodes, **arguments)
    for expected, trace in zip(whole, on_nodes(resumed, WARM_UP, nodes, **arguments), strict=True):
        assert trace == expected


class CountsLate(torch.optim.SGD):
    """Counts in its param group from the tenth step on, which no trial finds."""

    taken = 0

    def step(self, closure=None):
        self.taken += 1
        if self.taken >= 10:
            self.param_groups[0]["count"] = self.taken
        return super().step(closure)


@pytest.mark.parametrize("nodes", [((0,),), TWO], ids=str)
def test_steps_delay_refuses_an_optimizer_that_counts_in_its_param_group(nodes):
    message = "cannot serve CountsInGroup.*it changes 'scale' in param_groups.*Use AllReduce"
    with pytest.raises(ValueError, match=message):
        on_nodes(steps(1), StepsDelay(2, 2, local_update="sgd"), nodes, shapes=SHAPES, inner=CountsInGroup)


@pytest.mark.parametrize("warmup_steps", [0, 20])
def test_an_optimizer_that_begins_to_count_in_its_param_group_is_found(warmup_steps):
    with pytest.raises(RuntimeError, match=r"CountsLate\.step\(\) changed 'count' in param_groups.*Use AllReduce"):
        run_to_end(steps(12), StepsDelay(2, warmup_steps), TWO, inner=partial(CountsLate, lr=0.1))


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
