"""Optimizers on Fabric: those that communicate, or step in halves, and uncounted steps."""

from __future__ import annotations

import pytest
import torch
from fits import our_warnings, weights_of
from lightning.fabric import Fabric
from stepping import SAM
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_hiercomm import AllReduce, HierarchicalFabricStrategy, PeriodicAveraging


def on_fabric(borrow, work, scheme, ranks_per_node=1, ranks=2):
    """The error, our warnings and the weights with which a loop on Fabric ends, on each rank."""

    def program(_):
        strategy, error = HierarchicalFabricStrategy(scheme, ranks_per_node=ranks_per_node), ""
        fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
        with our_warnings() as said:
            try:
                module = fabric.launch(work, strategy)
                strategy.finish()
            except RuntimeError as raised:
                error = str(raised)
        for run in strategy.runs:
            run.close(timeout=20.0)
        strategy.topology.close()
        return error, said, [] if error else weights_of(module)

    return borrow(program, ranks=ranks)


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def batches(fabric):
    generator = torch.Generator().manual_seed(fabric.global_rank)
    return torch.randn(16, 4, 3, generator=generator)


def plain(fabric, model, optimizer, x):
    optimizer.step()


def loop(optimizer_of, step=plain):
    def work(fabric, strategy):
        module = layers()
        model, optimizer = fabric.setup(module, optimizer_of(module, strategy))
        for x in batches(fabric):
            optimizer.zero_grad()
            fabric.backward(model(x).square().mean())
            step(fabric, model, optimizer, x)
        return module

    return work


def sgd(module, strategy=None):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def zero(module, strategy=None):
    group = strategy and strategy.node_process_group
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, process_group=group, lr=0.05)


def test_zero_on_fabric_is_refused_over_nodes_and_right_inside_one(borrow, tmp_path):
    for error, _, _ in on_fabric(borrow, loop(lambda module, _: zero(module)), PeriodicAveraging(2)):
        assert "ZeroRedundancyOptimizer.step() communicates over several nodes" in error

    def saving(fabric, strategy):
        module = loop(zero)(fabric, strategy)
        run = strategy.runs[0]
        fabric.save(tmp_path / "saved.ckpt", {"optimizer": run.optimizers[0]})
        return module

    works = saving, loop(lambda module, _: torch.optim.Adam(module.parameters(), 0.05))
    ours, adam = (on_fabric(borrow, work, PeriodicAveraging(2), 2, ranks=4) for work in works)
    for (error, said, weights), (_, _, expected) in zip(ours, adam, strict=True):
        assert (error, said) == ("", [])
        assert weights == pytest.approx(expected, abs=1e-6)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["optimizer"]
    assert sorted(saved["state"]) == [0, 1, 2, 3]


def sam(module, strategy=None):
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
def test_on_fabric_changes_without_a_counted_step_end_the_run(borrow, optimizer, step, scheme, message):
    for error, said, _ in on_fabric(borrow, loop(optimizer, step), scheme):
        assert message in error
        assert message or (error, said) == ("", [])
