"""PowerSGD of many runs follows the paper's algorithm."""

from __future__ import annotations

import pytest
import torch

from benchmarks.papers.many import Arena, State
from benchmarks.papers.power_sgd import PowerSGD, matrices, shapes_of, share_sent

pytest.importorskip("mnist1d")

ARENA = Arena("small", nodes=2, batch=200, epochs=1)


def begun(rank, runs=2):
    count = sum(shape.numel() for shape in shapes_of(ARENA))
    weights = torch.zeros(runs, 1, count)
    state = State(ARENA, weights, torch.zeros_like(weights), torch.ones(runs, 1, 1))
    method = PowerSGD(rank)
    method.begin(state)
    return method, state, count


def test_matrices_of_the_cnn():
    found = list(matrices(shapes_of(ARENA), rank=2))
    assert found == [
        (slice(0, 125), 25, 5),
        (slice(150, 2025), 25, 75),
        (slice(2050, 3925), 25, 75),
        (slice(3950, 5200), 10, 125),
    ]
    assert share_sent(shapes_of(ARENA), 2) == pytest.approx((60 + 200 + 200 + 270 + 85) / 5210)


def test_gradients_of_low_rank_arrive_unchanged():
    method, state, count = begun(rank=2)
    gradients = torch.zeros(2, 2, count)
    kernel = torch.randn(2, 1, 25, 2) @ torch.randn(2, 1, 2, 75)
    gradients[..., 150:2025] = kernel.flatten(-2)
    gradients[..., 125:150] = torch.randn(2, 2, 25)
    method.step(state, gradients)
    torch.testing.assert_close(-state.weights, gradients.mean(1, keepdim=True), atol=1e-4, rtol=1e-4)


def test_residuals_hold_the_rounding_errors():
    method, state, count = begun(rank=1)
    total = torch.zeros(2, 1, count)
    for _ in range(3):
        gradients = torch.randn(2, 2, count)
        total += gradients.mean(1, keepdim=True)
        before = state.weights.clone()
        velocity = state.velocity.clone()
        method.step(state, gradients)
        sent = before - state.weights - 0.9 * velocity  # what momentum SGD received
        total -= sent
    torch.testing.assert_close(total, method.residual.mean(1, keepdim=True), atol=1e-4, rtol=1e-4)


def test_one_step_by_hand():
    """M = [[2, 0], [0, 1]] in the corner of a kernel: the power iteration from its own start."""
    method, state, count = begun(rank=1, runs=1)
    gradients = torch.zeros(1, 2, count)
    gradients[..., 3950], gradients[..., 3950 + 126] = 2.0, 1.0  # of the 10 x 125 matrix, (0, 0) and (1, 1)
    q = method.right[3][0, 0, :2, 0]
    method.step(state, gradients)
    p = torch.stack([2 * q[0], q[1]])
    p = p / p.norm()
    expected = torch.outer(p, torch.stack([2 * p[0], p[1]]))
    found = -state.weights[0, 0, 3950:5200].view(10, 125)[:2, :2]
    torch.testing.assert_close(found, expected)
