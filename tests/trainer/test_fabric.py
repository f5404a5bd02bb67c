"""Loops on Fabric train what a Trainer trains."""

from __future__ import annotations

import copy
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
from pairwise import on_push
from problems import one_trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Epochs,
    Gossip,
    Health,
    HeterogeneousBatches,
    HierarchicalFabricStrategy,
    HierarchicalStrategy,
    PeriodicAveraging,
    Plateau,
    StepsDelay,
)

EPOCHS, STEPS = 2, 4
SCHEMES = {
    "all_reduce": AllReduce(),
    "periodic": PeriodicAveraging(3),
    "daso": DASO(2, 1, warmup=Epochs(1), cooldown=0),
    "steps_delay": StepsDelay(2, 2),
    "gossip": Gossip(hierarchical=False, overlap=True),
}


class Net(pl.LightningModule):
    """Without ``state``, a node's parameters are all that it has of its own between two synchronizations."""

    def __init__(self, state=True) -> None:
        super().__init__()
        self.state = state
        norm = nn.BatchNorm1d(4) if state else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 1))
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + index / 10)

    def forward(self, batch):
        return (self.layers(batch).squeeze(1) - batch.sum(1)).square().mean()

    def training_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9 if self.state else 0.0)

    def train_dataloader(self, shuffle=True):
        samples = torch.randn(4 * STEPS * 4, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(samples, batch_size=4, shuffle=shuffle)


def by_trainer(scheme, folder):
    module, strategy = Net(), HierarchicalStrategy(scheme, ranks_per_node=2)
    one_trainer(folder, devices=4, strategy=strategy, max_epochs=EPOCHS).fit(module)
    return module.state_dict()


def launch(scheme, work, *arguments, **settings):
    """``work(fabric, strategy)`` on two nodes of two ranks."""
    strategy = HierarchicalFabricStrategy(scheme, ranks_per_node=2, **settings)
    return Fabric(accelerator="cpu", devices=4, strategy=strategy).launch(work, strategy, *arguments)


def on_this_rank(scheme, work, *arguments, **settings):
    """``launch`` where a launcher has started the ranks, which go on: nothing of it may stay."""

    def work_and_end(fabric, strategy, *arguments):
        returned = work(fabric, strategy, *arguments)
        for run in strategy.runs:
            run.close(timeout=20.0)
        strategy.topology.close()
        return returned

    return launch(scheme, work_and_end, *arguments, **settings)


@pytest.fixture
def launched(borrow):
    """``launched(scheme, work, ...)``: what ``work`` returns on each of four ranks that stay for the next one."""

    def run(scheme, work, *arguments, **settings):
        return borrow(lambda _: on_this_rank(scheme, work, *arguments, **settings))

    return run


def set_up(fabric, state=True, shuffle=True):
    module = Net(state)
    loader = fabric.setup_dataloaders(module.train_dataloader(shuffle))
    return *fabric.setup(module, module.configure_optimizers()), loader


def train_epoch(fabric, model, optimizer, loader):
    for batch in loader:
        fabric.backward(model(batch))
        optimizer.step()
        optimizer.zero_grad()


def loop(fabric, strategy):
    model, optimizer, loader = set_up(fabric)
    for _ in strategy.epochs(EPOCHS, steps=len(loader)):
        train_epoch(fabric, model, optimizer, loader)
        with strategy.averaged_model():
            averaged = fabric.all_gather(torch.cat([p.detach().flatten() for p in model.parameters()]))
            assert (averaged == averaged[0]).all()
    return model.state_dict()


@pytest.mark.parametrize("scheme", on_push(SCHEMES.values(), SCHEMES["periodic"], SCHEMES["gossip"]), ids=SCHEMES)
def test_a_fabric_loop_equals_a_trainer_bit_for_bit(borrow, scheme):
    for ours, expected in borrow(lambda folder: (on_this_rank(scheme, loop), by_trainer(scheme, folder))):
        assert ours.keys() == expected.keys()
        for name, value in ours.items():
            assert torch.equal(value, expected[name]), name


def test_a_strategy_without_references_is_collected(borrow):
    def program(_):
        strategy = HierarchicalFabricStrategy(PeriodicAveraging(2), ranks_per_node=2)
        Fabric(accelerator="cpu", devices=4, strategy=strategy).launch(loop, strategy)
        left = weakref.ref(strategy)
        del strategy
        gc.collect()
        return left() is None

    assert borrow(program) == [True] * 4


def first_half(fabric, strategy, path):
    model, optimizer, loader = set_up(fabric, state=False, shuffle=False)  # Fabric's loaders forget the epoch
    for epoch in strategy.epochs(EPOCHS):
        train_epoch(fabric, model, optimizer, loader)
        if epoch == 0:
            own = next(model.parameters()).detach().clone()
            fabric.save(path, {"model": model, "optimizer": optimizer, "schedule": strategy})
            assert torch.equal(own, next(model.parameters())), "saving must not touch what trains"
    return model.state_dict()


def second_half(fabric, strategy, path):
    model, optimizer, loader = set_up(fabric, state=False, shuffle=False)
    fabric.load(path, {"schedule": strategy, "model": model, "optimizer": optimizer})
    assert strategy.schemes[0].state.steps == STEPS
    assert strategy.schemes[0].phase in ("delay", "training")
    for _ in strategy.epochs(EPOCHS, first=1):
        train_epoch(fabric, model, optimizer, loader)
    return model.state_dict()


@pytest.mark.parametrize("scheme", [PeriodicAveraging(2), StepsDelay(2, STEPS), DiLoCo(2)], ids=repr)
def test_a_loop_resumes_where_it_synchronized(launched, scheme, tmp_path):
    # all of them synchronize at the last step of the first epoch, so nothing is lost in the checkpoint
    whole, resumed = (launched(scheme, half, tmp_path / "half.ckpt") for half in (first_half, second_half))
    torch.testing.assert_close(resumed, whole)


def test_a_state_of_another_format_is_refused():
    strategy = HierarchicalFabricStrategy()
    with pytest.raises(ValueError, match="format") as raised:
        strategy.load_state_dict({"schedules": []})
    assert str(raised.value) == (
        "the strategy's entry in the checkpoint has no format number, but this version of lightning-hiercomm reads only"
        " format 4. Leave the strategy out of the state of fabric.load to continue from the parameters alone."
    )
    state = strategy.state_dict()
    strategy.load_state_dict(state)
    assert strategy.state_dict() == state


def half_without_epochs(fabric, strategy, path, resumes):
    torch.manual_seed(fabric.global_rank)
    module = torch.nn.Linear(3, 1)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    state = {"model": model, "optimizer": optimizer, "strategy": strategy}
    if resumes:
        fabric.load(path, state)
    (scheme,) = strategy.schemes
    synchronized_at = []
    for step in range(6 * resumes, 14):
        before = scheme.state.synchronizations
        fabric.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        synchronized_at += [step + 1] * (scheme.state.synchronizations > before)
        if step == 5 and not resumes:
            fabric.save(path, state)
    return synchronized_at


@pytest.mark.parametrize("scheme", [PeriodicAveraging(4), DASO(4, 0, 0, 0), DiLoCo(4)], ids=type)
def test_a_resumed_loop_without_epochs_keeps_its_schedule(launched, scheme, tmp_path):
    runs = [launched(scheme, half_without_epochs, tmp_path / "half.ckpt", resumes) for resumes in (False, True)]
    for whole, resumed in zip(*runs, strict=True):
        assert resumed == [step for step in whole if step > 6]
        assert len(resumed) >= 2


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
    weights = fabric.all_gather(module.layers[0].weight)
    assert (weights == weights[0]).all()


def test_a_loop_without_epochs_accumulates_and_clips(launched):
    launched(PeriodicAveraging(2), without_epochs)


def two_modules(fabric, strategy):
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    one, sgd = fabric.setup(first, torch.optim.SGD(first.parameters(), 0.1))
    two, adam = fabric.setup(second, torch.optim.Adam(second.parameters(), 0.1))
    for step in range(4):
        batch = torch.full((2, 2), float(fabric.global_rank + step))
        fabric.backward(two(one(batch)).square().mean())
        for optimizer in (sgd, adam):
            optimizer.step()
            optimizer.zero_grad()
    assert [scheme.state.synchronizations for scheme in strategy.schemes] == [2, 2]
    strategy.finish()
    for module in (first, second):
        weights = fabric.all_gather(module.weight)
        assert (weights == weights[0]).all()


def one_after_the_other(fabric, strategy):
    learned = []
    for together in (True, False):
        torch.manual_seed(fabric.global_rank)
        module = nn.Linear(3, 1)
        if together:
            model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
        else:
            model = fabric.setup(module)
            optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
        for step in range(3):
            fabric.backward(model(torch.full((2, 3), step + fabric.global_rank / 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        learned.append(module.weight.detach().clone())
    strategy.finish()
    assert torch.equal(*learned)


@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(2)])
def test_a_module_may_be_set_up_before_its_optimizer(launched, scheme):
    launched(scheme, one_after_the_other)


def pretrained(fabric, strategy):
    module = nn.Linear(3, 2)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.0))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(10.0)
    for _ in strategy.epochs(2):
        for _ in range(3):
            fabric.backward(model(torch.ones(2, 3)).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert all((parameter == 10.0).all() for parameter in module.parameters())


@pytest.mark.parametrize(
    "scheme", on_push([*SCHEMES.values(), DiLoCo(2)], SCHEMES["all_reduce"], DiLoCo(2)), ids=[*SCHEMES, "diloco"]
)
def test_weights_that_are_loaded_after_the_setup_are_trained(launched, scheme):
    launched(scheme, pretrained)


def left_and_begun_again(fabric, strategy):
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    seen = []
    for count in (2, 4):
        for _ in strategy.epochs(count, first=count - 2):
            seen.append(module.weight.item())
            fabric.backward(-model(torch.full((1, 1), 1.0 + fabric.global_rank)).sum())
            optimizer.step()
            optimizer.zero_grad()
            break
    strategy.finish()
    assert [*seen, module.weight.item()] == [0.0, 2.5, 5.0]


def test_a_second_loop_starts_from_the_averaged_model_of_the_first(launched):
    launched(PeriodicAveraging(100), left_and_begun_again)


def by_closures(fabric, strategy, make, watched):
    """Rank r's loss is that of its number, so that the loss of some grows where that of most shrinks."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, -1.0)
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


def unfreezing(fabric, strategy):
    """The bias is unfrozen after three steps, and an unused parameter."""
    module = nn.Linear(1, 1).double()
    with torch.no_grad():
        module.weight.fill_(1.0)
        module.bias.fill_(0.0)
    module.unused = nn.Parameter(torch.ones(1, dtype=torch.float64))
    module.unused.requires_grad_(False)
    module.bias.requires_grad_(False)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    target, seen = float(fabric.global_rank), []
    for step in range(6):
        module.bias.requires_grad_(step >= 3)
        module.unused.requires_grad_(step >= 3)
        waited = strategy.communication()["inter_exposed_seconds"]
        fabric.backward(0.5 * (model(torch.zeros(1, 1, dtype=torch.float64)) + module.weight - target).square().sum())
        crosses = strategy.schemes[0].config.gradients == "world"
        assert (strategy.communication()["inter_exposed_seconds"] > waited) == crosses
        assert module.unused.grad is None  # weight decay and momentum would move what has one of zeros
        optimizer.step()
        optimizer.zero_grad()
        seen.append((module.weight.item(), module.bias.item()))
    strategy.finish()
    return [*seen, (module.weight.item(), module.bias.item())]


def growing(fabric, strategy):
    """A bias comes after three steps; every rank has a target of its own for weight + bias."""
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(module.weight)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    target, seen = float(fabric.global_rank), []
    for step in range(6):
        if step == 3:
            module.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
            optimizer.add_param_group({"params": [module.bias]})
        fabric.backward(0.5 * (model(torch.zeros(1, 1, dtype=torch.float64)) + module.weight - target).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        seen.append((module.weight.item(), 0.0 if step < 3 else module.bias.item()))
    strategy.finish()
    return [*seen, (module.weight.item(), module.bias.item())]


@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(1)], ids=repr)
@pytest.mark.parametrize("program", [unfreezing, growing])
def test_unfrozen_or_added_parameters_get_equal_gradients(launched, scheme, program):
    weight, bias, expected = 1.0, 0.0, []
    for step in range(6):  # of all ranks the mean, whose targets' mean is 1.5
        gradient = weight + bias - 1.5
        weight, bias = weight - 0.1 * gradient, bias - 0.1 * gradient * (step >= 3)
        expected.append((weight, bias))
    for seen in launched(scheme, program):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor([*expected, expected[-1]]), rtol=1e-9, atol=1e-9)


def unfreezing_sparse(fabric, strategy):
    """A row for each of three ranks, and none for the fourth, is unfrozen after two steps."""
    module = nn.Sequential(nn.Embedding(4, 1, sparse=True).requires_grad_(False), nn.Linear(1, 1, bias=False)).double()
    nn.init.zeros_(module[0].weight)
    nn.init.ones_(module[1].weight)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    for step in range(4):
        module[0].weight.requires_grad_(step >= 2)
        rows = torch.tensor([fabric.global_rank] * (fabric.global_rank < 3), dtype=torch.int64)
        fabric.backward(model(rows).sum())
        module[1].weight.grad.zero_()
        optimizer.step()
        optimizer.zero_grad()
    strategy.finish()
    return module[0].weight.flatten().tolist()


@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(1)], ids=repr)
def test_an_embedding_with_sparse_gradients_may_be_unfrozen_in_mid_run(launched, scheme):
    assert launched(scheme, unfreezing_sparse) == [pytest.approx([-0.5, -0.5, -0.5, 0.0], rel=1e-7, abs=1e-7)] * 4


def unfrozen_half(fabric, strategy, path, resumes):
    module = nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.fill_(1.0)
        module.bias.fill_(0.0)
    module.bias.requires_grad_(False)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.01))

    def train(steps):
        for step in steps:
            if step >= 2:
                module.bias.requires_grad_(True)
            fabric.backward((model(torch.full((2, 3), step + 1.0)) - fabric.global_rank).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    everything = {"model": model, "optimizer": optimizer, "schedule": strategy}
    if resumes:
        fabric.load(path, everything)
    else:
        train(range(4))
        fabric.save(path, everything)
    train(range(4, 8))
    strategy.finish()
    return module.state_dict()


@pytest.mark.parametrize(
    "scheme",
    on_push([AllReduce(), PeriodicAveraging(2), DiLoCo(2), DiLoCo(2, torch.optim.Adam), StepsDelay(2, 8)], DiLoCo(2)),
    ids=repr,
)
def test_a_loop_resumes_after_parameters_were_unfrozen(launched, scheme, tmp_path):
    whole, resumed = (launched(scheme, unfrozen_half, tmp_path / "half.ckpt", resumes) for resumes in (False, True))
    torch.testing.assert_close(resumed, whole)


class PartlyUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize(("arguments", "warned"), [({}, 1), ({"find_unused_parameters": True}, 0)])
def test_unused_parameters_warn_at_one_rank_per_node(recwarn, arguments, warned):
    strategy = HierarchicalFabricStrategy(**arguments)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    module = PartlyUsed()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    for _ in range(3):
        fabric.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    said = [str(warning.message) for warning in recwarn if "not used" in str(warning.message)]
    assert len(said) == warned
    for text in said:
        assert "by the forward pass: unused.weight, unused.bias. They are not trained." in text
        assert "`strategy=HierarchicalFabricStrategy(find_unused_parameters=True)`" in text


def turns(fabric, strategy):
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    one, sgd = fabric.setup(first, torch.optim.SGD(first.parameters(), 0.1))
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


def test_every_module_has_a_scheme_of_its_own(launched):
    launched(PeriodicAveraging(2), two_modules)


def lazy(fabric, strategy):
    module = nn.LazyLinear(1)
    with pytest.raises(RuntimeError, match=r"uninitialized parameters \(weight, bias\)"):
        fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))


def collect(fabric, strategy):
    gc.collect()


@pytest.mark.timeout(60)
def test_a_forked_rank_leaves_the_garbage_of_its_parent_alone(process_group_in_the_garbage):
    launch(AllReduce(), collect, start_method="fork")


def nothing(fabric, strategy):
    pass


def test_ranks_that_end_at_once_do_not_end_before_all_are_connected(monkeypatch):
    new_group = dist.new_group

    def slower_on_the_last_rank(*arguments, **keywords):
        if dist.get_rank() == 3:
            time.sleep(0.5)
        return new_group(*arguments, **keywords)

    monkeypatch.setattr(dist, "new_group", slower_on_the_last_rank)
    launch(PeriodicAveraging(2), nothing, start_method="fork")


def test_a_module_without_values_is_refused_by_name(launched):
    launched(PeriodicAveraging(2), lazy)


def test_names_are_registered_with_fabric():
    strategy = Fabric(accelerator="cpu", devices=1, strategy="hierarchical_daso").strategy
    assert type(strategy) is HierarchicalFabricStrategy
    assert isinstance(strategy._settings.scheme, DASO)  # noqa: SLF001


def test_setup_in_another_order_is_refused_by_name():
    strategy = HierarchicalFabricStrategy()
    with pytest.raises(RuntimeError, match=r"call fabric.launch\(\) before fabric.setup"):
        strategy.setup_module_and_optimizers(nn.Linear(1, 1), [])
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    fabric.setup_module(nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"SGD trains no module .* call fabric.setup\(module, optimizer\)"):
        fabric.setup_optimizers(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))
    with pytest.raises(RuntimeError, match="set it up together with its module"):
        strategy.optimizer_step(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))


def test_a_loss_may_be_made_of_gradients_but_goes_backward_through_fabric():
    strategy, module = HierarchicalFabricStrategy(DASO()), nn.Linear(2, 1)  # which watches the loss
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
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


def test_bad_arguments_are_refused_by_name():
    with pytest.raises(TypeError, match=r"HierarchicalFabricStrategy has no argument 'rank_per_node'\. Did you mean"):
        HierarchicalFabricStrategy(rank_per_node=2)
    with pytest.raises(ValueError, match="monitor='val_loss' is a metric that LightningModules log"):
        HierarchicalFabricStrategy(DASO(plateau=Plateau(monitor="val_loss")))
    with pytest.raises(ValueError, match="scheme='telepathy' is unknown"):
        HierarchicalFabricStrategy("telepathy")
    with pytest.raises(TypeError, match="timeout=30 must be timedelta"):
        HierarchicalFabricStrategy(timeout=30)
    with pytest.raises(
        ValueError, match=r"in the middle of your own loop: use a Trainer with HierarchicalStrategy\(elastic=\.\.\.\)"
    ):
        HierarchicalFabricStrategy(elastic="10.0.0.1:29510")
    with pytest.raises(ValueError, match="ranks_per_node=3 does not divide the world of 4 ranks"):
        Fabric(accelerator="cpu", devices=4, strategy=HierarchicalFabricStrategy(ranks_per_node=3))
    shown = "HierarchicalFabricStrategy(DiLoCo(sync_every=100), ranks_per_node=2, wire_dtype='int4')"
    assert repr(HierarchicalFabricStrategy("diloco", 2, wire_dtype="int4")) == shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": HeterogeneousBatches(8)}, "batches=.* needs a Trainer"),
        ({"evaluate": "replica"}, r"evaluate='replica': .* strategy\.averaged_model\(\)"),
        ({"checkpoint_replicas": True}, "checkpoint_replicas=True: .* leave it out"),
        ({"health": Health(hang_timeout=60)}, r"health=Health\(.*hang_timeout=60\): the control plane needs a Trainer"),
    ],
)
def test_arguments_that_need_a_trainer_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        HierarchicalFabricStrategy(**arguments)


def with_friends(fabric, strategy):
    """A module whose teacher is a part of it, and one with a teacher, and averages, outside it."""
    module, outside = nn.Linear(2, 1), nn.Linear(2, 1)
    module.teacher = nn.Parameter(torch.zeros(2), requires_grad=False)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    teacher = fabric.setup_module(outside.requires_grad_(False))
    normal = fabric.setup_module(nn.SyncBatchNorm(2, affine=False))  # DDP takes none with parameters on a CPU
    assert dist.get_process_group_ranks(normal.process_group) == [*strategy.topology.intra.ranks]
    average, copied = AveragedModel(model), copy.deepcopy(model)
    assert copied.weight is not module.weight
    for _ in range(2):
        fabric.backward((model(torch.ones(1, 2)) - fabric.global_rank).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        outside.bias.fill_(fabric.global_rank)
        module.teacher.fill_(2.0 * fabric.global_rank)
    fabric.backward(copied(torch.ones(1, 2)).sum() * 0.0)
    with strategy.averaged_model():
        assert [teacher.bias.item(), *module.teacher.tolist()] == [1.5, 3.0, 3.0]
    assert [outside.bias.item(), module.teacher[0].item()] == [fabric.global_rank, 2.0 * fabric.global_rank]
    strategy.finish()
    assert [outside.bias.item(), *module.teacher.tolist()] == [1.5, 3.0, 3.0]


@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(5)], ids=repr)
def test_teachers_are_part_of_the_averaged_model_and_averages_are_copied(launched, scheme):
    launched(scheme, with_friends)


def unfreezing_between_synchronizations(fabric, strategy):
    module = nn.Linear(1, 1).double()
    with torch.no_grad():
        module.weight.fill_(0.0)
        module.bias.fill_(0.0)
    module.bias.requires_grad_(False)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.5))
    seen = []
    for step in range(3):
        module.bias.requires_grad_(step >= 2)
        fabric.backward(0.5 * (model(torch.ones(1, 1).double()) - 4.0 * (fabric.global_rank // 2)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        seen.append((module.weight.item(), module.bias.item()))
    # towards 0 on one node and 4 on the other, by halves; before the third pass their average is 1.5
    expected = [[(0.0, 0.0), (0.0, 0.0), (0.75, -0.75)], [(2.0, 0.0), (3.0, 0.0), (2.75, 1.25)]]
    assert seen == expected[fabric.global_rank // 2], seen


def test_nodes_synchronize_before_the_first_forward_after_an_unfreeze(launched):
    launched(PeriodicAveraging(5), unfreezing_between_synchronizations)


def late_and_back(fabric, strategy, folder):
    """Sets up a second module in mid-run, reads a teacher, and goes back to an earlier state of all."""
    first, second, teacher = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    model, optimizer = fabric.setup(first, torch.optim.SGD(first.parameters(), lr=0.1))
    more, phases, saved = [], [], {"model": model, "optimizer": optimizer, "schedule": strategy}
    fabric.save(folder / "teacher.ckpt", {"teacher": teacher})
    for epoch in strategy.epochs(4, steps=2):
        for _ in range(2):
            for each, stepper in [(model, optimizer), *more]:
                fabric.backward((each(torch.ones(1, 1)) - fabric.global_rank).square().sum())
                stepper.step()
                stepper.zero_grad()
            if not more:
                more = [fabric.setup(second, torch.optim.SGD(second.parameters(), lr=0.1))]
                saved |= {"more": more[0][0], "more_optimizer": more[0][1]}
        if epoch == 1:
            fabric.save(folder / "good.ckpt", saved)
            own = first.weight.item()
            fabric.load(folder / "teacher.ckpt", {"teacher": teacher})
            assert first.weight.item() == own
            with strategy.averaged_model():
                weights = fabric.all_gather(first.weight)
                assert (weights == weights[0]).all()
        if epoch == 2:
            fabric.load(folder / "good.ckpt", saved)
            assert [scheme.state.steps for scheme in strategy.schemes] == [4, 3]
        phases.append([(scheme.phase, scheme.state.epoch) for scheme in strategy.schemes])
    names = ["warm-up", "cycling", "cycling", "cool-down"]
    assert phases == [[(name, epoch)] * 2 for epoch, name in enumerate(names)], phases


def test_a_loop_goes_on_with_a_later_module_and_after_a_load(launched, tmp_path):
    launched(DASO(4, 2, warmup=Epochs(1), cooldown=Epochs(1)), late_and_back, tmp_path)


def losing_patience(fabric, strategy, path, resumes):
    module = nn.Linear(1, 1)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.0))
    saved, periods = {"model": model, "optimizer": optimizer, "schedule": strategy}, []
    if resumes:
        fabric.load(path, saved)
    for epoch in strategy.epochs(6, first=2 * resumes):
        for _ in range(2):
            fabric.backward(model(torch.ones(1, 1)).sum() * 0.0 + 1.0)
            optimizer.step()
        periods.append(strategy.schemes[0].period)
        if epoch == 1 and not resumes:
            fabric.save(path, saved)
    return periods


def test_the_loss_before_a_save_counts_after_a_resume(launched, tmp_path):
    scheme, path = DASO(4, 2, 0, 0, plateau=Plateau(patience=2)), tmp_path / "half.ckpt"
    whole, resumed = (launched(scheme, losing_patience, path, resumes)[3] for resumes in (False, True))
    assert whole[0] != whole[-1]
    assert resumed == whole[2:]


def test_an_optimizer_of_two_modules_is_refused():
    fabric = Fabric(accelerator="cpu", devices=1, strategy=HierarchicalFabricStrategy())
    fabric.launch()
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], 0.1)
    fabric.setup_module(one)
    fabric.setup_module(other)
    with pytest.raises(TypeError, match=r"trains parameters of Linear and of another module, .* one nn.ModuleList"):
        fabric.setup_optimizers(optimizer)
