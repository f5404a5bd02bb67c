"""Optimizers on Fabric: those that communicate, or step in halves, and uncounted steps."""

from __future__ import annotations

import pytest
import torch
from fits import our_warnings, weights_of
from pytorch_optimizer import SAM
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_hiercomm import AllReduce, PeriodicAveraging


def plain(fabric, model, optimizer, x):
    optimizer.step()


def loop(fabric, strategy, optimizer_of, step=plain, path=None):
    """The error, our warnings and the weights with which a loop ends."""
    error = ""
    with our_warnings() as said:
        try:
            torch.manual_seed(0)
            module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
            model, optimizer = fabric.setup(module, optimizer_of(module, strategy))
            for x in torch.randn(16, 4, 3, generator=torch.Generator().manual_seed(fabric.global_rank)):
                optimizer.zero_grad()
                fabric.backward(model(x).square().mean())
                step(fabric, model, optimizer, x)
            if path is not None:
                fabric.save(path, {"optimizer": strategy.runs[0].optimizers[0]})
            strategy.finish()
        except RuntimeError as raised:
            error = str(raised)
    return error, said, weights_of(module)


def sgd(module, strategy):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def zero(module, strategy):
    group = strategy.node_process_group
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, process_group=group, lr=0.05)


def zero_over_nodes(module, strategy):
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.05)


def adam(module, strategy):
    return torch.optim.Adam(module.parameters(), 0.05)


def test_zero_on_fabric_is_refused_over_nodes_and_right_inside_one(launched, tmp_path):
    for error, _, _ in launched(PeriodicAveraging(2), loop, zero_over_nodes):
        assert "ZeroRedundancyOptimizer.step() communicates over several nodes" in error
    ours = launched(PeriodicAveraging(2), loop, zero, plain, tmp_path / "saved.ckpt")
    for (error, said, weights), (_, _, expected) in zip(ours, launched(PeriodicAveraging(2), loop, adam), strict=True):
        assert (error, said) == ("", [])
        assert weights == pytest.approx(expected, abs=1e-6)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["optimizer"]
    assert sorted(saved["state"]) == [0, 1, 2, 3]


def sam(module, strategy):
    return SAM(module.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def halves(fabric, model, optimizer, x):
    optimizer.first_step(zero_grad=True)
    fabric.backward(model(x).square().mean())
    optimizer.second_step(zero_grad=True)


def closure(fabric, model, optimizer, x):
    optimizer.step(closure=lambda: fabric.backward(model(x).square().mean()))


@torch.no_grad()
def by_hand(fabric, model, optimizer, x):
    for p in model.parameters():
        p -= 0.1 * p.grad


@pytest.mark.parametrize(
    ("optimizer", "step", "scheme", "message"),
    [
        (sgd, by_hand, PeriodicAveraging(2), "changed in 16 batches without a counted optimizer step"),
        (sam, halves, AllReduce(), ""),
        (sam, closure, PeriodicAveraging(2), ""),
    ],
)
def test_on_fabric_changes_without_a_counted_step_end_the_run(launched, optimizer, step, scheme, message):
    for error, said, _ in launched(scheme, loop, optimizer, step):
        assert message in error
        assert message or (error, said) == ("", [])
