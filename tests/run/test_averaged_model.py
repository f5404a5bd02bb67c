"""What validation, callbacks and files see of nodes that differ: in one launch, under every kind of scheme."""

from __future__ import annotations

import copy
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from harness import on_ranks
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from pairwise import on_push, requested
from problems import one_trainer
from torch.utils.data import DataLoader

from lightning_hiercomm import DASO, AllReduce, DiLoCo, Gossip, HierarchicalStrategy, PeriodicAveraging, StepsDelay
from lightning_hiercomm.run.averaged_model import AveragedModel
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.schemes import OuterOptimizer, ParameterSync
from lightning_hiercomm.schemes.reducers.graphs import RandomPermutation

SCHEMES = {
    "all_reduce": AllReduce,
    "periodic": partial(PeriodicAveraging, 4),
    "daso": partial(DASO, 2, warmup=0, cooldown=0),
    "eq1": partial(ParameterSync, schedule=4, staleness=2, merge="eq1"),
    "steps_delay": partial(StepsDelay, 2, warmup_steps=2),
    "gossip": partial(Gossip, fragments=2),
    "diloco": partial(DiLoCo, 4),
    "diloco_rarely": partial(DiLoCo, 100),
    "streaming": partial(DiLoCo, 4, fragments=2, staleness=1, keep_local=0.5),
    "noloco": partial(ParameterSync, schedule=4, reducer=RandomPermutation(), merge=OuterOptimizer()),
}
MEANS = [name for name in SCHEMES if name not in ("steps_delay", "gossip")]
"""Whose averaged model is the mean of the nodes' present weights; the others' has a meaning of its own."""


class Drifting(pl.LightningModule):
    """Rank r goes from 0 towards r + 1, slowly; ``own`` is what it holds after a batch, ``seen`` what it validates."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
        self.teacher = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64), requires_grad=False)
        self.backbone = torch.nn.Parameter(torch.ones(6), requires_grad=False)
        self.own: list[torch.Tensor] = []
        self.seen: list[tuple[int, torch.Tensor]] = []
        self.own_teacher: list[torch.Tensor] = []
        self.seen_teacher: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        return 0.5 * (self.x - self.global_rank - 1).square().sum()

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.seen.append((len(self.own), self.x.detach().clone()))
            self.seen_teacher.append(self.teacher.clone())
        self.log("val_loss", (self.x - 3.0).square().sum(), sync_dist=True)

    def on_train_batch_end(self, *_):
        with torch.no_grad():
            self.teacher.data = 0.5 * (self.teacher.data + self.x.data)  # as MoCo's authors and lightly write it
        self.own.append(self.x.detach().clone())
        self.own_teacher.append(self.teacher.clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self):
        return DataLoader(torch.zeros(7 * self.trainer.world_size, 1))

    def val_dataloader(self):
        return DataLoader(torch.zeros(self.trainer.world_size, 1))


def _fit(folder, name, callbacks=(), **arguments):
    strategy = HierarchicalStrategy(SCHEMES[name](), ranks_per_node=1)
    defaults = {"devices": 2, "max_epochs": 2, "val_check_interval": 3, "enable_checkpointing": True}
    trainer = one_trainer(folder, strategy=strategy, callbacks=list(callbacks), **{**defaults, **arguments})
    module = Drifting()
    trainer.fit(module)
    return trainer, module


def _file(path):
    return torch.load(path, weights_only=True)["state_dict"]["x"]


def _program(names, folder):
    """Of one rank, under the schemes that tests ask for, by the name of their parameter."""
    said = {}
    for name in sorted(set().union(*names.values())):
        place = folder / name
        every = ModelCheckpoint(place, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        trainer, module = _fit(
            place, name, [every, ModelCheckpoint(place / "last", save_last=True, save_on_train_epoch_end=True)]
        )
        own = {
            "own": module.own,
            "seen": list(module.seen),
            "after fit": module.x.detach().clone(),
            "teacher": module.teacher.clone(),
            "own teacher": module.own_teacher,
            "seen teacher": list(module.seen_teacher),
            "last teacher": torch.load(place / "last" / "last.ckpt", weights_only=True)["state_dict"]["teacher"],
            "last": _file(place / "last" / "last.ckpt"),
            "on the way": {step: _file(place / f"step={step}.ckpt") for step in (3, 6, 9, 12)},
        }
        trainer.save_checkpoint(place / "after.ckpt")
        own["saved after fit"] = _file(place / "after.ckpt")
        own["schemes"] = torch.load(place / "after.ckpt", weights_only=True)["hiercomm"]["schemes"]
        trainer.validate(module, verbose=False)
        trainer.save_checkpoint(place / "validated.ckpt")
        own["saved after validate"] = _file(place / "validated.ckpt")

        if name in names["saved"]:
            default = ModelCheckpoint(place / "default")
            _, module = _fit(place, name, [default], max_epochs=1, val_check_interval=None)
            own["default"] = _file(default.best_model_path), module.x.detach().clone()
        if name in names["stopped"]:
            stopping = EarlyStopping("val_loss", patience=1, mode="min")
            stopped, _ = _fit(place, name, [stopping], enable_checkpointing=False)
            own["steps with EarlyStopping"] = stopped.global_step
        said[name] = copy.deepcopy(own)
    return said


@pytest.fixture(scope="module")
def ranks(borrow, request):
    names = {
        parameter: {name for (name,) in requested(request, parameter)} for parameter in ("name", "saved", "stopped")
    }
    return borrow(partial(_program, names), ranks=2)


@pytest.fixture(params=on_push(SCHEMES, "periodic", "steps_delay", "gossip", "streaming"))
def name(request):
    return request.param


@pytest.mark.parametrize("name", on_push(MEANS, "periodic", "streaming"))
def test_validation_runs_on_the_mean_of_the_nodes_present_weights(ranks, name):
    one, other = (rank[name] for rank in ranks)
    assert [step for step, _ in one["seen"]] == [3, 6, 10, 13]
    for (step, seen), (_, seen_by_other) in zip(one["seen"], other["seen"], strict=True):
        mean = (one["own"][step - 1] + other["own"][step - 1]) / 2
        torch.testing.assert_close(seen, mean, rtol=1e-12, atol=0)
        assert torch.equal(seen, seen_by_other)


@pytest.mark.parametrize("name", on_push(MEANS, "periodic", "streaming"))
def test_a_file_on_the_way_holds_the_mean_of_the_nodes_present_weights(ranks, name):
    one, other = (rank[name] for rank in ranks)
    for step, saved in one["on the way"].items():
        torch.testing.assert_close(saved, (one["own"][step - 1] + other["own"][step - 1]) / 2, rtol=1e-12, atol=0)


def test_the_last_checkpoint_equals_the_final_model(ranks, name):
    for rank in ranks:
        said = rank[name]
        assert torch.equal(said["last"], said["after fit"])
    assert torch.equal(ranks[0][name]["after fit"], ranks[1][name]["after fit"])


@pytest.mark.parametrize("saved", on_push(SCHEMES, "gossip"))
def test_a_default_checkpoint_callback_saves_the_final_model(ranks, saved):
    for rank in ranks:
        assert torch.equal(*rank[saved]["default"])


def test_a_teacher_is_averaged_wherever_the_model_is_seen(ranks, name):
    one, other = (rank[name] for rank in ranks)
    for (step, _), seen, seen_by_other in zip(one["seen"], one["seen teacher"], other["seen teacher"], strict=True):
        mean = (one["own teacher"][step - 1] + other["own teacher"][step - 1]) / 2
        torch.testing.assert_close(seen, mean, rtol=1e-12, atol=0)
        assert torch.equal(seen, seen_by_other)
    assert torch.equal(one["teacher"], other["teacher"])
    assert torch.equal(one["last teacher"], one["teacher"])


@pytest.mark.parametrize("stopped", on_push(SCHEMES, "periodic"))
def test_early_stopping_does_not_end_a_run_that_gets_better(ranks, stopped):
    assert ranks[0][stopped]["steps with EarlyStopping"] == 14


def test_file_saved_after_fit_holds_module_and_schedule(ranks, name):
    said = ranks[0][name]
    assert torch.equal(said["saved after fit"], said["after fit"])
    assert torch.equal(said["saved after validate"], said["after fit"])
    assert [scheme["steps"] for scheme in said["schemes"]] == [14]


class Averages(pl.Callback):
    """Ends a run on an average of its own, as Lightning's callbacks do, but this one no scheme or hook knows."""

    def on_train_end(self, trainer, pl_module):
        pl_module.x.data.copy_(torch.stack(pl_module.own).mean(0))


def _averaging_program(folder):
    """Ranks of one node train alone."""
    said = {}
    for name, callback in (("on its own", Averages()), ("ema", EMAWeightAveraging(decay=0.5))):
        scheme = Gossip("ring", hierarchical=False, overlap=True)
        strategy = HierarchicalStrategy(scheme, ranks_per_node=2)
        saves = ModelCheckpoint(folder / name, save_last=True, save_on_train_epoch_end=True)
        arguments = {"devices": 2, "max_epochs": 2, "enable_checkpointing": True, "callbacks": [callback, saves]}
        module = Drifting()
        one_trainer(folder, strategy=strategy, **arguments).fit(module)
        said[name] = {"own": module.own, "after fit": module.x.detach().clone()}
        said[name]["last"] = _file(folder / name / "last.ckpt")
    return said


@pytest.fixture(scope="module")
def ranks_of_one_node(borrow):
    return borrow(_averaging_program, ranks=2)


def test_average_loaded_by_a_callback_reaches_all_ranks_of_a_node(ranks_of_one_node):
    own = [torch.stack(rank["on its own"]["own"]).mean(0) for rank in ranks_of_one_node]
    assert not torch.equal(*own)
    for rank in ranks_of_one_node:
        torch.testing.assert_close(rank["on its own"]["after fit"], sum(own) / 2, rtol=1e-12, atol=0)


def test_a_file_of_averaged_weights_holds_the_mean_of_all_ranks_of_a_node(ranks_of_one_node):
    averages = []
    for rank in ranks_of_one_node:
        own = rank["ema"]["own"]
        average = own[0]
        for values in own[1:]:
            average = average.lerp(values, 0.5)
        averages.append(average)
    assert not torch.equal(*averages)
    for rank in ranks_of_one_node:
        torch.testing.assert_close(rank["ema"]["last"], sum(averages) / 2, rtol=1e-12, atol=0)
        assert torch.equal(rank["ema"]["after fit"], rank["ema"]["last"])


def test_averaging_keeps_the_bits_of_equal_values():
    equal = torch.rand(1000, generator=torch.Generator().manual_seed(0))

    def work(topology):
        module = torch.nn.Module()
        module.equal = torch.nn.Parameter(equal.clone())
        module.other = torch.nn.Parameter(torch.full((3,), float(topology.rank)))
        AveragedModel([], Replicas(module, []), topology).average_module()
        return module.equal.detach(), module.other.detach()

    for kept, averaged in on_ranks(work, nodes=((0,), (1,), (2,))):
        assert torch.equal(kept, equal)
        assert averaged.tolist() == [1.0] * 3


class FailsToValidate(Drifting):
    fails = True

    def validation_step(self, batch, batch_idx):
        if self.fails:
            raise ValueError("the dog ate the batch")
        super().validation_step(batch, batch_idx)


def _validated_after_an_error(folder):
    strategy = HierarchicalStrategy(PeriodicAveraging(100, at_epoch_end=False), ranks_per_node=1)
    trainer, module = one_trainer(folder, devices=2, strategy=strategy), FailsToValidate()
    with pytest.raises(ValueError, match="the dog"):
        trainer.fit(module)
    held, module.fails = module.x.detach().clone(), False
    trainer.validate(module, verbose=False)
    ((_, seen),) = module.seen
    return held, seen, module.x.detach()


def test_a_validation_after_one_that_failed_leaves_the_module_as_it_is(borrow):
    for held, seen, left in borrow(_validated_after_an_error, ranks=2):
        assert torch.equal(seen, held)
        assert torch.equal(left, held)
