"""What a program changes in param groups reaches the server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import Rank, on_nodes, reloaded, run_to_end

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import StepsDelay

TWO = ((0,), (1,))
TWO_OF_TWO = ((0, 1), (2, 3))
SHAPES = {"a": (3, 2), "b": (5,), "c": (1,)}
WARM_UP = StepsDelay(2, warmup_steps=20)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


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
def test_a_plain_checkpoint_resumes_together_with_a_scheduler(nodes):
    """Exact resumes with rates that change are in test_calculations.py."""
    saved: dict[int, Any] = {}

    def take_three_steps(rank: Rank, scheduler: Any) -> None:
        for _ in range(3):
            rank.train()
            scheduler.step()

    def scheduler_of(rank: Rank) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(rank.optimizer, lambda step: 1 / (1 + step))

    def first(rank: Rank) -> list[Any]:
        take_three_steps(rank, scheduler := scheduler_of(rank))
        state = {"optimizer": rank.scheme.optimizer_state(), "scheduler": scheduler.state_dict()}
        saved[rank.rank] = reloaded({**state, "values": list(map(torch.Tensor.clone, rank.parameters))})
        take_three_steps(rank, scheduler)
        return rank.trace[3:]

    def resumed(rank: Rank) -> list[Any]:
        state, scheduler = saved[rank.rank], scheduler_of(rank)
        with torch.no_grad():
            for parameter, values in zip(rank.parameters, state["values"], strict=True):
                parameter.copy_(values)
        rank.scheme.follow(Replica(rank.parameters))
        rank.optimizer.load_state_dict(state["optimizer"])
        rank.scheme.load_state_dict({**rank.scheme.state_dict(shared=True), "steps": 3})
        rank.scheme.begin_run(1, None)
        scheduler.load_state_dict(state["scheduler"])
        take_three_steps(rank, scheduler)
        return rank.trace

    arguments: dict[str, Any] = {"shapes": SHAPES, "inner": MOMENTUM, "targets": (4.0, 4.0, 4.0)}
    whole = on_nodes(first, WARM_UP, nodes, **arguments)
    for expected, trace in zip(whole, on_nodes(resumed, WARM_UP, nodes, **arguments), strict=True):
        assert trace == expected
