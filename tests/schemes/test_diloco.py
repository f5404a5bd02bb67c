"""DiLoCo, against traces worked by hand; its equations are in test_calculations.py."""

from __future__ import annotations

import math

import pytest
import torch
from harness import steps

from lightning_hiercomm.schemes import DiLoCo

pytestmark = pytest.mark.usefixtures("device")  # cpu, and cuda where there is one

TWO = ((0,), (1,))
UNEQUAL = ((0, 1), (2,))
SEVENS = {"a": 7, "b": 5, "c": 11}  # odd sizes, so that shards, buckets and fragments cut tensors


def constant(steps, *gradients):
    """Train with a constant gradient per rank; all values after each step."""

    def work(rank):
        for _ in range(steps):
            rank.train(gradients[rank.rank])
        return rank.trace

    return work


@pytest.mark.parametrize(
    ("scheme", "nodes", "gradients", "expected"),
    [
        (
            DiLoCo(2),
            TWO,
            (1.0, 3.0),
            {
                2: [0.468, 0.468],
                3: [0.368, 0.168],
                4: [-0.2908, -0.2908],
                6: [-1.25372, -1.25372],
                8: [-2.400348, -2.400348],
            },
        ),
        (DiLoCo(2), UNEQUAL, (1.0, 1.0, 3.0), {2: [1.67 / 3] * 3, 4: [-0.227 / 3] * 3, 6: [-0.8781] * 3}),
        (DiLoCo(2), UNEQUAL, (0.5, 1.5, 3.0), {2: [1.67 / 3] * 3, 4: [-0.227 / 3] * 3, 6: [-0.8781] * 3}),
        (
            DiLoCo(3, staleness=2, keep_local=0.0),
            TWO,
            (1.0, 3.0),
            {3: [0.734] * 2, 5: [0.534, 0.134], 6: [0.3546] * 2, 9: [-0.12686] * 2},
        ),
    ],
    ids=["DiLoCo", "unequal nodes", "unequal ranks", "stale by two"],
)
def test_one_weight_follows_the_trace(on_nodes, scheme, nodes, gradients, expected):
    for rank, seen in enumerate(on_nodes(constant(9, *gradients), scheme, nodes)):
        for step, values in expected.items():
            assert seen[step - 1] == pytest.approx([values[rank]], abs=1e-6), step


def test_streamed_fragments_follow_the_trace(on_nodes):
    scheme = DiLoCo(4, fragments=2, staleness=1, keep_local=0.5)
    expected = {
        2: [(0.767, 0.8), (0.567, 0.4)],
        4: [(0.567, 0.401), (-0.033, 0.001)],
        6: [(0.050245, 0.201), (-0.449755, -0.599)],
        8: [(-0.149755, -0.468265), (-1.049755, -1.068265)],
        10: [(-0.902865, -0.668265), (-1.552865, -1.668265)],
        12: [(-1.102865, -1.51281), (-2.152865, -2.21281)],
    }
    for shapes in ({"f0": 1, "f1": 1}, {"both": 2}):
        for rank, seen in enumerate(on_nodes(constant(12, 1.0, 3.0), scheme, TWO, shapes=shapes)):
            for step, values in expected.items():
                assert seen[step - 1] == pytest.approx(values[rank], abs=1e-6), step


def test_more_fragments_by_name_than_the_period_has_room_for_are_refused(on_nodes):
    with pytest.raises(ValueError, match=r"staleness=2 must be at most 1 for .* with 3 fragments"):
        on_nodes(steps(1), DiLoCo(6, fragments=["a", "c"], staleness=2), TWO, shapes=SEVENS)
    with pytest.raises(ValueError, match="no parameter is in 'd'"):
        on_nodes(steps(1), DiLoCo(6, fragments=["d"]), TWO, shapes=SEVENS)


def test_a_fragment_by_name_may_hold_nothing_that_is_trained_now(on_nodes):
    scheme = DiLoCo(6, fragments=["a"])
    before = on_nodes(lambda rank: rank.train(1.0), scheme, shapes=SEVENS, start=1.0, frozen=["a"])
    assert all(values.eq(1.0).all() for values in before)


def test_watched_values_name_the_schedule(on_nodes):
    def work(rank):
        rank.train(torch.ones_like)
        return rank.scheme.scalars()

    for scalars in on_nodes(work, DiLoCo(8, staleness=2), TWO):
        assert scalars["sync_every"] == 8
        assert scalars["staleness"] == 2


@pytest.mark.parametrize(
    ("scheme", "nodes", "steps", "said"),
    [
        (DiLoCo(16), 8, 512, "synchronizes nodes 32 times in this run of 512 optimizer steps"),
        (DiLoCo(16, warmup_steps=256), 8, 512, "synchronizes nodes 16 times in this run of 512 optimizer steps"),
        (DiLoCo(16), 8, 3199, "synchronizes nodes 199 times in this run of 3199 optimizer steps"),
        (DiLoCo(16), 8, 3200, None),
        (DiLoCo(16), 8, math.inf, None),
        (DiLoCo(16), 1, 512, None),
        (DiLoCo(16), 8, 15, "but the run ends after 15"),
    ],
)
def test_diloco_warns_of_fewer_than_200_synchronizations(scheme, nodes, steps, said):
    warnings = list(scheme.check_run(nodes, 100, steps))
    assert [said in warning for warning in warnings] == ([True] if said else [])
