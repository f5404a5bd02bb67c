"""What callbacks load into the averaged model, and what is left of it after an error.

What validations and files hold under every scheme is in ``tests/test_trainer_combinations.py``.
"""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from harness import on_ranks
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from problems import Drifting, one_trainer

from lightning_hiercomm import Gossip, HierarchicalStrategy, PeriodicAveraging
from lightning_hiercomm.run.averaged_model import AveragedModel
from lightning_hiercomm.run.replicas import Replicas


def _file(path):
    return torch.load(path, weights_only=True)["state_dict"]["x"]


class Averages(pl.Callback):
    """Ends a run on an average of its own, as Lightning's callbacks do, but this one no scheme or hook knows."""

    def on_train_end(self, trainer, pl_module):
        pl_module.x.data.copy_(torch.stack(pl_module.own).mean(0))


def _averaging_program(folder):
    """Two nodes of one rank each."""
    said = {}
    for name, callback in (("on its own", Averages()), ("ema", EMAWeightAveraging(decay=0.5))):
        strategy = HierarchicalStrategy(Gossip("ring", overlap=True), ranks_per_node=1)
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
    (seen,) = module.seen
    return held, seen, module.x.detach()


def test_a_validation_after_one_that_failed_leaves_the_module_as_it_is(borrow):
    for held, seen, left in borrow(_validated_after_an_error, ranks=2):
        assert torch.equal(seen, held)
        assert torch.equal(left, held)
