"""Outer optimizers: what they keep, also over resumes, other nodes and unfreezes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import TWO_BY_TWO, Rank, reloaded, steps
from torch.optim import SGD, Adam, AdamW

from lightning_hiercomm.schemes import DiLoCo
from lightning_hiercomm.schemes.components.tensor_state import by_element, in_runs

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

TWO = ((0,), (1,))
THREE = ((0,), (1,), (2,))
UNEQUAL = ((0, 1), (2,))
SEVENS = {"a": 7, "b": 5, "c": 11}  # odd sizes, so that shards, buckets and fragments cut tensors
NUMEL = sum(SEVENS.values())
ADAM = partial(Adam, lr=0.1)
DAMPENED = partial(SGD, lr=0.7, momentum=0.9, dampening=0.5)  # whose first step is another than one with momentum zero


def target_of(shapes: dict[str, Any]) -> torch.Tensor:
    """A target of all ranks, so that the number of nodes makes no difference."""
    numel = sum(torch.empty(shape).numel() for shape in shapes.values())
    return torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def train(rank: Rank, number: int, target: torch.Tensor) -> list[list[float]]:
    """Train towards the target of all ranks; all values after each step."""
    for _ in range(number):
        rank.train(lambda x: x - target.to(x.dtype))
    return rank.trace


def plain_state(rank: Rank) -> dict[str, Any]:
    """What a plain checkpoint holds, without synchronizing."""
    return reloaded({"scheme": rank.scheme.state_dict(shared=True), "values": rank.scheme.replica.snapshot()})


def load_plain(rank: Rank, state: dict[str, Any]) -> None:
    rank.scheme.replica.restore(state["values"])
    rank.scheme.load_state_dict(state["scheme"])
    assert repr(reloaded(rank.scheme.state_dict(shared=True))) == repr(state["scheme"])


class DecaysWithoutGradient(SGD):
    """Shrinks all of its parameters in each step, with or without gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.mul_(0.5)
        return super().step(closure)


SHAPES = {"a": (3, 2), "b": (5,), "c": (1,)}


def test_a_bucket_is_stepped_alone(on_nodes):
    outer = partial(DecaysWithoutGradient, lr=1.0)
    expected = 0.5 + 0.1 * 3.0 + 0.1 * 2.7  # half of 1, and the two inner steps
    arguments = {"shapes": SHAPES, "bucket_bytes": 16, "targets": [4.0] * 4}
    for rank in on_nodes(steps(2), DiLoCo(2, outer), TWO_BY_TWO, **arguments):
        assert rank.trace[-1] == pytest.approx([expected] * 12, abs=1e-5)


def test_the_state_of_a_rank_holds_its_shard_of_the_outer_optimizer_alone(on_nodes):
    def work(rank: Rank) -> int:
        state = steps(2)(rank).state()["scheme"]
        assert "outer" not in state
        return sum(run["state"]["exp_avg"].numel() for runs in state["outer_shards"] for run in runs)

    assert on_nodes(work, DiLoCo(2, ADAM), TWO_BY_TWO, shapes=SEVENS) == [(NUMEL + 1) // 2] * 4


@pytest.mark.parametrize(
    ("outer", "fragments", "shapes", "saved_after"),
    [
        *((ADAM, fragments, SHAPES, 7) for fragments in (1, 2)),
        *((outer, 2, {"x": 12}, 3) for outer in (ADAM, DAMPENED)),  # half of the tensor has taken an outer step
    ],
    ids=["Adam", "Adam, fragments", "Adam in a cut tensor", "dampened in a cut tensor"],
)
@pytest.mark.parametrize("nodes", [THREE, UNEQUAL], ids=str)
def test_a_plain_state_goes_on_with_the_outer_steps_on_other_nodes(
    on_nodes, nodes, outer, fragments, shapes, saved_after
):
    scheme, target = DiLoCo(4, outer, fragments=fragments), target_of(shapes)
    arguments: dict[str, Any] = {"shapes": shapes, "dtype": torch.float64}

    def saving(rank: Rank) -> Any:
        train(rank, saved_after, target)
        return plain_state(rank)

    saved = on_nodes(saving, scheme, TWO_BY_TWO, **arguments)[0]

    def resuming(rank: Rank) -> list[Any]:
        load_plain(rank, saved)
        return train(rank, 9, target)

    straight = on_nodes(partial(train, number=saved_after + 9, target=target), scheme, TWO_BY_TWO, **arguments)[0]
    for trace in on_nodes(resuming, scheme, nodes, bucket_bytes=16, **arguments):
        torch.testing.assert_close(trace, straight[saved_after:], rtol=0, atol=1e-12)


def test_cutting_a_million_elements_into_runs_takes_no_time_per_element():
    numel = 10**6
    columns = by_element({"exp_avg": torch.zeros(numel), "step": torch.tensor(3.0)}, torch.zeros(numel))
    columns["step_by_element"] = columns["step_by_element"].clone()
    columns["step_by_element"][numel // 2 :] = 4.0
    began = time.thread_time()
    runs = in_runs(columns, numel)
    assert time.thread_time() - began < 0.5  # torch.unique_consecutive of rows took 1.4 s, and 250 bytes per element
    assert [(length, float(state["step"])) for length, state in runs] == [(numel // 2, 3.0), (numel // 2, 4.0)]


@pytest.mark.parametrize(
    "outer",
    [partial(SGD, lr=0.7, momentum=0.9, nesterov=True), partial(AdamW, lr=0.05, weight_decay=0.1)],
    ids=["nesterov", "adamw"],
)
@pytest.mark.parametrize(
    ("nodes", "fragments", "elements", "bucket_bytes"),
    [
        (THREE, 1, [range(23)], 2**22),
        (UNEQUAL, 2, [range(12), range(12, 23)], 24),
        (TWO_BY_TWO, ["c"], [range(12, 23), range(12)], 40),
        (((0, 1, 2), (3, 4, 5)), 3, [range(8), range(8, 16), range(16, 23)], 16),
    ],
    ids=["three nodes", "unequal nodes", "named fragments", "six ranks"],
)
def test_a_plain_state_restores_the_outer_optimizer_in_other_fragments(
    on_nodes, outer: Callable[..., Any], nodes, fragments, elements, bucket_bytes
):
    arguments, target = {"shapes": SEVENS, "dtype": torch.float64}, target_of(SEVENS)

    def saving(rank):
        train(rank, 8, target)
        schedule = rank.scheme.state_dict(shared=True)
        rank.scheme.synchronize()
        return reloaded({"scheme": schedule, "values": rank.scheme.replica.snapshot()})

    saved = on_nodes(saving, DiLoCo(6, outer), TWO_BY_TWO, **arguments)
    assert all(repr(one) == repr(saved[0]) for one in saved)

    def resuming(rank):
        load_plain(rank, saved[0])
        train(rank, 12, target)
        return rank.averaged()

    # the same in one place: an outer optimizer for each set of elements that the resumed run has as a fragment
    x = torch.ones(NUMEL, dtype=torch.float64)
    references = [torch.nn.Parameter(x[list(part)]) for part in elements]
    optimizers = [outer([reference]) for reference in references]
    for step in range(1, 21):
        x -= 0.1 * (x - target)
        for p, (part, reference, optimizer) in enumerate(zip(elements, references, optimizers, strict=True)):
            if step % 6 == (0 if step <= 8 else (p + 1) * 6 // len(elements) % 6):
                reference.grad = reference.detach() - x[list(part)]
                optimizer.step()
                x[list(part)] = reference.detach()
    for averaged in on_nodes(resuming, DiLoCo(6, outer, fragments), nodes, bucket_bytes=bucket_bytes, **arguments):
        torch.testing.assert_close(averaged, x, rtol=0, atol=1e-12)
