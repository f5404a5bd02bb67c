"""NaN and infinity are noticed before they reach another node, by every scheme, and by no message more."""

from __future__ import annotations

import math
from functools import partial

import harness
import pytest
import torch
from harness import Rank, on_nodes, run_to_end
from torch.optim import SGD, Adam
from zoo import ZOO, without

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes import Gossip, PeriodicAveraging, StepsDelay
from lightning_hiercomm.schemes.nonfinite import NonfiniteError, find_unfit, is_unfit

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

THREE = ((0,), (1,), (2,))
PAIRS = ((0, 1), (2, 3), (4, 5))
SHAPES = {"a": 3, "b": 4, "c": 2}

AVERAGED = without("all_reduce", "steps_delay")


def becomes_nonfinite(rank: Rank, steps: int, at: int, victim: int, value: float = math.nan) -> Rank:
    """Trains towards the target; at one step the victim's gradient of one element is not finite."""
    for step in range(steps):

        def gradient(x: torch.Tensor, now: bool = step == at and rank.rank == victim) -> torch.Tensor:
            flat = x - rank.target
            if now:
                flat[4] = value  # of b
            return flat

        rank.train(gradient, last=step == steps - 1)
    return rank


ill_at_four = partial(becomes_nonfinite, steps=12, at=4, victim=2)


@pytest.mark.parametrize("scheme", ZOO)
def test_the_first_bad_parameter_is_named_where_it_raises(scheme):
    with pytest.raises(NonfiniteError, match=r"rank \d \(node \d\).* parameter b \(1 of 4 elements\)"):
        run_to_end(ill_at_four, ZOO[scheme], PAIRS, shapes=SHAPES, timeout=5)


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_an_optimizers_state_that_is_not_finite_is_named(wire):
    def work(rank: Rank) -> None:
        for step in range(4):  # whose square is infinite, but no parameter is
            rank.train(1e22 if (step, rank.rank) == (3, 1) else 1.0)

    scheme = harness.with_policy(PeriodicAveraging(2), average_optimizer_state=True)
    with pytest.raises(NonfiniteError, match=r"rank 1 \(node 1\): parameter 0 in the optimizer's exp_avg_sq \(1 of 1"):
        on_nodes(work, scheme, THREE, inner=partial(Adam, lr=0.1), wire=wire)


@pytest.mark.parametrize("scheme", AVERAGED)
@pytest.mark.parametrize(("wire", "dtype", "far"), [("float16", torch.float32, 1e6), ("int8", torch.float64, 1e300)])
def test_values_too_large_for_the_wire_are_named_with_the_remedy(scheme, wire, dtype, far):
    def work(rank: Rank) -> Rank:
        for step in range(5):
            rank.train(-far if step == 0 and rank.node == 1 else 0.0, last=step == 4)
        return rank

    training = {"shapes": SHAPES, "dtype": dtype, "wire": wire, "inner": partial(SGD, lr=1.0)}
    message = (
        r"are too large for .*: rank \d \(node \d\): parameter a \(3 of 3 elements\).* Use a wider wire_dtype, such"
    )
    with pytest.raises(NonfiniteError, match=message):
        run_to_end(work, ZOO[scheme], PAIRS, timeout=5, **training)


def test_gradients_too_large_for_the_wire_do_not_reach_the_server():
    def work(rank: Rank) -> None:
        for step in range(6):
            rank.train(1e6 if step == 3 and rank.node == 1 else 0.1)

    message = r"are too large for .*: rank \d \(node 1\): the gradient of parameter a"
    training = {"shapes": SHAPES, "wire": "float16", "inner": partial(SGD, lr=0.1)}
    with pytest.raises(NonfiniteError, match=message):
        run_to_end(work, StepsDelay(2, warmup_steps=0), PAIRS, timeout=5, **training)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_tensors_that_are_not_finite_are_unfit(dtype):
    values = torch.tensor([0.0, -0.0, 1.5, -3.0], dtype=dtype)
    assert is_unfit([values, torch.zeros(0, dtype=dtype)]) == 0
    for bad in (math.nan, math.inf, -math.inf):
        nonfinite = values.clone()
        nonfinite[2] = bad
        assert is_unfit([values, nonfinite]) == 1


def test_tensors_of_several_dtypes_are_checked_each_in_its_own_range():
    wide, narrow = torch.tensor([1e300], dtype=torch.float64), torch.ones(2)
    assert is_unfit([wide, narrow]) == 0
    assert is_unfit([wide * 1e300, narrow]) == 1
    assert is_unfit([wide, narrow * math.nan]) == 1


@pytest.mark.parametrize(("value", "unfit"), [(4.0, 0), (-4.0, 0), (4.5, 1), (-4.5, 1)])
def test_values_beyond_the_largest_are_unfit(value, unfit):
    assert is_unfit([torch.tensor([0.0, value]), torch.ones(1, dtype=torch.float64)], largest=4.0) == unfit


def test_finite_values_whose_sum_overflows_are_fit():
    large = torch.full((4,), 3e38)
    assert is_unfit([large]) == 0
    assert find_unfit(Replica([large]), {}) == (None, None)
    assert find_unfit(Replica([large]), {id(large): 2e38}) == (
        None,
        "parameter number 0 of shape (4,) (4 of 4 elements)",
    )

    def work(rank: Rank) -> torch.Tensor:
        rank.train(-3e38 if rank.rank == 0 else -1e38)
        return rank.values

    for scheme in (PeriodicAveraging(1), Gossip(fragments=1)):
        values = on_nodes(work, scheme, ((0,), (1,)), shapes=SHAPES, inner=partial(SGD, lr=1.0))
        for value in values:
            torch.testing.assert_close(value, torch.full_like(value, 2e38))
