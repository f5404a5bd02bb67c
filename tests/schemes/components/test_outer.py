"""Outer optimizers and their schedulers: what they keep, also over resumes, other nodes and unfreezes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import TWO_BY_TWO, Rank, reloaded, steps
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from lightning_hiercomm.schemes import DiLoCo, OuterOptimizer, ParameterSync
from lightning_hiercomm.schemes.components.outer import RunningOuterOptimizer

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

TWO = ((0,), (1,))
THREE = ((0,), (1,), (2,))
UNEQUAL = ((0, 1), (2,))
SEVENS = {"a": 7, "b": 5, "c": 11}  # odd sizes, so that shards, buckets and fragments cut tensors
NUMEL = sum(SEVENS.values())
HALVING = partial(StepLR, step_size=1, gamma=0.5)
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


@pytest.mark.parametrize("bucket_bytes", [16, 2**20])
@pytest.mark.parametrize("nodes", [TWO, TWO_BY_TWO, UNEQUAL], ids=str)
def test_outer_steps_are_those_of_one_optimizer_whatever_the_buckets(on_nodes, bucket_bytes, nodes):
    # inner SGD(0.1) towards 4, two steps a period, and the outer optimizer of all parameters at once
    x = torch.nn.Parameter(torch.ones(12))
    outer = ADAM([x])
    for _ in range(3):
        x.grad = (x.detach() - 4.0) * (1 - 0.9**2)
        outer.step()
    arguments = {"shapes": SHAPES, "bucket_bytes": bucket_bytes, "targets": [4.0] * 4}
    for rank in on_nodes(steps(6), DiLoCo(2, ADAM), nodes, **arguments):
        assert rank.trace[-1] == pytest.approx(x.tolist(), abs=1e-5)


def test_a_bucket_is_stepped_alone(on_nodes):
    outer = partial(DecaysWithoutGradient, lr=1.0)
    expected = 0.5 + 0.1 * 3.0 + 0.1 * 2.7  # half of 1, and the two inner steps
    arguments = {"shapes": SHAPES, "bucket_bytes": 16, "targets": [4.0] * 4}
    for rank in on_nodes(steps(2), DiLoCo(2, outer), TWO_BY_TWO, **arguments):
        assert rank.trace[-1] == pytest.approx([expected] * 12, abs=1e-5)


@pytest.mark.parametrize(("every", "fragments", "staleness"), [(6, 1, 0), (4, 1, 3), (6, 2, 0), (6, 3, 1)])
def test_the_outer_scheduler_counts_periods(on_nodes, every, fragments, staleness):
    scheme = DiLoCo(every, partial(SGD, lr=0.8), fragments, staleness, outer_scheduler=HALVING)

    def work(rank):
        seen = []
        for _ in range(every * 3):
            rank.train(torch.ones_like)
            seen.append(rank.scheme.scalars()["outer_lr"])
        return seen

    for seen in on_nodes(work, scheme, TWO, shapes=SEVENS):
        assert seen == [0.8] * (every - 1) + [0.4] * every + [0.2] * every + [0.1]


def test_saved_outer_scheduler_counts_the_pending_period(on_nodes):
    scheme = DiLoCo(4, partial(SGD, lr=0.5), staleness=2, outer_scheduler=HALVING)
    saved = {}

    def first(rank):
        steps(7)(rank)  # sent after the sixth step, to be merged after the eighth
        saved[rank.rank] = reloaded(rank.scheme.state_dict(shared=True))
        return steps(5)(rank).scheme.scalars()["outer_lr"]

    def resumed(rank):
        rank.scheme.load_state_dict(saved[rank.rank])
        rank.scheme.begin_run(1, None)
        return steps(5)(rank).scheme.scalars()["outer_lr"]

    assert on_nodes(first, scheme) == on_nodes(resumed, scheme) == [0.0625] * 2


def test_the_outer_scheduler_steps_before_the_next_exchange_is_merged(on_nodes):
    """An exchange that leaves when the one before it is merged is stepped with the next period's learning rate."""

    class Recorded(OuterOptimizer):
        def build(self, reducer, before=None):
            return Recording(self, reducer, before)

    class Recording(RunningOuterOptimizer):
        def end_round(self):
            time.sleep(0.02)  # the exchange that has left arrives meanwhile, if one has
            super().end_round()

        def update_reference(self, index, reference, difference):
            rates.append(self.learning_rate)
            return super().update_reference(index, reference, difference)

    rates = []
    merge = Recorded(partial(SGD, lr=0.8), HALVING)
    on_nodes(steps(9), ParameterSync(2, merge=merge, staleness=2), TWO, shapes=SEVENS)
    assert sorted(rates, reverse=True) == [0.8, 0.8, 0.4, 0.4, 0.2, 0.2, 0.1, 0.1]


@pytest.mark.parametrize(
    ("outer", "fragments", "scheduler", "shapes", "saved_after"),
    [
        *((ADAM, fragments, None, SHAPES, 7) for fragments in (1, 2)),
        *((ADAM, fragments, partial(CosineAnnealingLR, T_max=5), SHAPES, 7) for fragments in (1, 2)),
        (ADAM, 1, partial(OneCycleLR, max_lr=1.0, total_steps=9), SHAPES, 7),
        (ADAM, 2, None, {"x": 12}, 3),  # the first fragment has stepped once, and the second, of the same tensor, never
    ],
    ids=["Adam", "Adam, fragments", "cosine", "cosine, fragments", "one cycle", "a cut tensor"],
)
@pytest.mark.parametrize("nodes", [TWO, TWO_BY_TWO], ids=str)
def test_an_exact_resume_goes_on_with_outer_steps(on_nodes, nodes, outer, fragments, scheduler, shapes, saved_after):
    scheme = DiLoCo(4, outer, fragments=fragments, outer_scheduler=scheduler)
    states: dict[int, Any] = {}

    def saving(rank: Rank) -> list[Any]:
        steps(saved_after)(rank)
        states[rank.rank] = rank.state()
        return steps(7)(rank).trace[saved_after:]

    def resuming(rank: Rank) -> list[Any]:
        rank.load(states[rank.rank])
        return steps(7)(rank).trace

    arguments: dict[str, Any] = {"shapes": shapes, "bucket_bytes": 16, "targets": None}
    whole = on_nodes(saving, scheme, nodes, **arguments)
    assert on_nodes(resuming, scheme, nodes, **arguments) == whole


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
