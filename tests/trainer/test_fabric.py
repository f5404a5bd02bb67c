"""The strategy for Fabric: set-up, steps, accumulation, and what it refuses."""

from __future__ import annotations

import gc
import time
import weakref
from datetime import timedelta
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from problems import one_trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from trainer.conftest import by_sgd, is_equal_on_all_ranks, launch, linear, on_this_rank, step

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Epochs,
    Gossip,
    HierarchicalFabricStrategy,
    HierarchicalStrategy,
    PeriodicAveraging,
    StepsDelay,
)

EPOCHS, STEPS = 2, 4
SCHEMES = [DASO(2, 1, warmup=Epochs(1), cooldown=0), StepsDelay(2, 2), Gossip(overlap=True)]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + index / 10)

    def forward(self, batch):
        return (self.layers(batch).squeeze(1) - batch.sum(1)).square().mean()

    def training_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def train_dataloader(self):
        samples = torch.randn(4 * STEPS * 4, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(samples, batch_size=4, shuffle=True)


def by_trainer(scheme, folder):
    module, strategy = Net(), HierarchicalStrategy(scheme, ranks_per_node=2)
    one_trainer(folder, devices=4, strategy=strategy, max_epochs=EPOCHS).fit(module)
    return module.state_dict()


def loop(fabric, strategy):
    module = Net()
    loader = fabric.setup_dataloaders(module.train_dataloader())
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    for _ in strategy.epochs(EPOCHS, steps=len(loader)):
        for batch in loader:
            step(fabric, model(batch), optimizer)
        with strategy.averaged_model():
            assert is_equal_on_all_ranks(fabric, torch.cat([p.flatten() for p in model.parameters()]))
    return model.state_dict()


@pytest.mark.parametrize("scheme", SCHEMES, ids=type)
def test_a_fabric_loop_equals_a_trainer_bit_for_bit(borrow, scheme):
    for ours, expected in borrow(lambda folder: (on_this_rank(scheme, loop), by_trainer(scheme, folder))):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_a_strategy_without_references_is_collected(borrow):
    def program(_):
        strategy = HierarchicalFabricStrategy(PeriodicAveraging(2), ranks_per_node=2)
        Fabric(accelerator="cpu", devices=4, strategy=strategy).launch(loop, strategy)
        left = weakref.ref(strategy)
        del strategy
        gc.collect()
        return left() is None

    assert borrow(program) == [True] * 4


def without_epochs(fabric, strategy):
    module = Net()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    assert isinstance(model._forward_module, DistributedDataParallel)
    loader = fabric.setup_dataloaders(module.train_dataloader())
    for index, batch in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            fabric.backward(model(batch) / 2)
        if index % 2:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    strategy.finish()
    counted = strategy.communication()
    assert (counted["steps"], counted["synchronizations"]) == (2, 1)
    assert counted["inter_bytes"] > 0
    assert is_equal_on_all_ranks(fabric, module.layers[0].weight)


def test_a_loop_without_epochs_accumulates_and_clips(launched):
    launched(PeriodicAveraging(2), without_epochs)


def one_after_the_other(fabric, strategy):
    learned = []
    for together in (True, False):
        torch.manual_seed(fabric.global_rank)
        module = nn.Linear(3, 1)
        if together:
            model, optimizer = by_sgd(fabric, module)
        else:
            model = fabric.setup(module)
            optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
        for number in range(3):
            step(fabric, model(torch.full((2, 3), number + fabric.global_rank / 4)).square().mean(), optimizer)
        learned.append(module.weight.detach().clone())
    strategy.finish()
    assert torch.equal(*learned)


def test_a_module_may_be_set_up_before_its_optimizer(launched):
    launched(PeriodicAveraging(2), one_after_the_other)


def pretrained(fabric, strategy):
    module = nn.Linear(3, 2)
    model, optimizer = by_sgd(fabric, module, lr=0.0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(10.0)
    for _ in strategy.epochs(2):
        for _ in range(3):
            step(fabric, model(torch.ones(2, 3)).mean(), optimizer)
    assert all((parameter == 10.0).all() for parameter in module.parameters())


@pytest.mark.parametrize("scheme", [AllReduce(), DiLoCo(2)], ids=type)
def test_weights_that_are_loaded_after_the_setup_are_trained(launched, scheme):
    launched(scheme, pretrained)


def by_closures(fabric, strategy, make, watched):
    """Rank r's loss is that of its number, so that the loss of some grows where that of most shrinks."""
    module = linear(1, 1, weight=-1.0, bias=False).float()
    model, optimizer = fabric.setup(module, make(module.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = 0.5 * (model(torch.ones(1, 1)) - 10.0 * fabric.global_rank).square().sum()
        fabric.backward(loss)
        return loss

    for _ in strategy.epochs(1):
        optimizer.step(closure)
        node = fabric.all_gather(module.weight.detach())[fabric.global_rank // 2 * 2 :][:2]
        assert node[0] == node[1] != -1.0
        assert strategy.runs[0].loss.state_dict().get("count", 0) == watched


@pytest.mark.parametrize(
    ("scheme", "make", "watched"),
    [
        (PeriodicAveraging(100), partial(torch.optim.LBFGS, line_search_fn="strong_wolfe"), 0),
        (DASO(), partial(torch.optim.SGD, lr=0.1), 1),
    ],
    ids=["lbfgs", "a watched loss"],
)
def test_a_step_may_evaluate_the_loss_itself(launched, scheme, make, watched):
    launched(scheme, by_closures, make, watched, timeout=timedelta(seconds=20))


def alone(scheme="all_reduce", **arguments):
    """Fabric on this process."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=HierarchicalFabricStrategy(scheme, **arguments))
    fabric.launch()
    return fabric


def turns(fabric, strategy):
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    one, sgd = by_sgd(fabric, first)
    two, adam = fabric.setup(second, torch.optim.Adam(second.parameters(), 0.1))
    seen = []
    for run in strategy.runs:
        run.loss.add = lambda loss, run=run: seen.append((strategy.runs.index(run), float(loss)))

    def backward(model, value):
        fabric.backward(0.0 * model(torch.ones(1, 1)).sum() + value)

    backward(one, 1.0)
    sgd.step()
    backward(two, 2.0)
    backward(two, 3.0)  # accumulated
    adam.step()
    backward(lambda x: one(x) + two(x), 4.0)
    sgd.step()
    adam.step()
    assert seen == [(0, 1.0), (1, 2.0), (1, 3.0), (0, 4.0), (1, 4.0)]


def test_a_loss_is_that_of_the_optimizers_that_step_before_the_next(launched):
    launched(DASO(2, 1, warmup=Epochs(1), cooldown=0), turns)


@pytest.mark.timeout(60)
def test_forked_ranks_connect_before_one_ends_and_keep_garbage_of_their_parent(
    monkeypatch, process_group_in_the_garbage
):
    new_group = dist.new_group

    def slower_on_the_last_rank(*arguments, **keywords):
        if dist.get_rank() == 3:
            time.sleep(0.5)
        return new_group(*arguments, **keywords)

    monkeypatch.setattr(dist, "new_group", slower_on_the_last_rank)
    launch(PeriodicAveraging(2), lambda *_: gc.collect(), start_method="fork")


def test_setup_in_another_order_is_refused_by_name():
    with pytest.raises(RuntimeError, match=r"call fabric.launch\(\) before fabric.setup"):
        HierarchicalFabricStrategy().setup_module_and_optimizers(nn.Linear(1, 1), [])
    fabric = alone()
    with pytest.raises(RuntimeError, match=r"uninitialized parameters \(weight, bias\)"):
        by_sgd(fabric, nn.LazyLinear(1))
    fabric.setup_module(nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"SGD trains no module .* call fabric.setup\(module, optimizer\)"):
        fabric.setup_optimizers(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))
    with pytest.raises(RuntimeError, match="set it up together with its module"):
        fabric.strategy.optimizer_step(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))


def test_an_optimizer_of_two_modules_is_refused():
    fabric, one, other = alone(), nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], 0.1)
    fabric.setup_module(one)
    fabric.setup_module(other)
    with pytest.raises(TypeError, match=r"trains parameters of Linear and of another module, .* one nn.ModuleList"):
        fabric.setup_optimizers(optimizer)


def test_a_loss_may_be_made_of_gradients_but_goes_backward_through_fabric():
    fabric, module = alone(DASO()), nn.Linear(2, 1)  # which watches the loss
    model, optimizer = by_sgd(fabric, module)
    places = torch.ones(4, 2, requires_grad=True)
    model(places).sum().backward()
    with pytest.raises(RuntimeError, match=r"call `fabric.backward\(loss\)`"):
        optimizer.step()
    optimizer.zero_grad()
    (forces,) = torch.autograd.grad(model(places).sum(), places, create_graph=True)
    before = module.weight.detach().clone()
    fabric.backward(0.5 * forces.square().mean(0).sum())
    optimizer.step()
    torch.testing.assert_close(module.weight, before - 0.1 * before)
