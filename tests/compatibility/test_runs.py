"""Programs: several runs of a trainer, evaluation alone, the Tuner, profilers, LightningCLI."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from pairwise import on_push
from problems import Quadratic, one_trainer

from lightning_hiercomm.schemes import SCHEMES


@pytest.mark.feature("fit twice")
@pytest.mark.parametrize("again", ["one trainer", "another trainer and strategy"])
def test_fit_twice(on_ranks, tmp_path, again):
    def main(trainer):
        module, first = Quadratic(), trainer()
        first.fit(module)
        first.fit_loop.max_epochs = 4
        (first if again == "one trainer" else trainer(max_epochs=1)).fit(module)
        return module.state_dict()

    ours, one = on_ranks(main), main(partial(one_trainer, tmp_path))
    for state in ours:
        torch.testing.assert_close(state, one, rtol=1e-5, atol=1e-6)


@pytest.mark.feature("validate, test, predict, alone and after fit")
@pytest.mark.parametrize("after_fit", [False, True])
def test_validate_and_test(on_ranks, tmp_path, after_fit):
    def main(trainer):
        module, trainer = Quadratic(), trainer()
        if after_fit:
            trainer.fit(module)
        (validated,), (tested,) = trainer.validate(module, verbose=False), trainer.test(module, verbose=False)
        return validated["val_loss"], tested["test_loss"], module.head.bias.item()

    one = main(partial(one_trainer, tmp_path))
    assert on_ranks(main) == [pytest.approx(one, rel=1e-5)] * 4


class Keep(BasePredictionWriter):
    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.predictions = torch.cat(predictions)


@pytest.mark.feature("validate, test, predict, alone and after fit")
def test_predict(on_ranks, tmp_path):
    def main(trainer):
        keep = Keep("epoch")
        trainer(callbacks=[keep]).predict(Quadratic(), return_predictions=False)
        return keep.predictions

    one = main(partial(one_trainer, tmp_path))
    for rank, predictions in enumerate(on_ranks(main)):
        torch.testing.assert_close(predictions, one[rank::4])


@pytest.mark.long("the finder takes its steps in a fit of its own before the fit")
@pytest.mark.feature("Tuner.lr_find")
def test_tuner(on_ranks):
    def main(trainer):
        module, trainer = Quadratic(8, lr=0.01), trainer(enable_checkpointing=True)
        before = module.head.bias.item()
        Tuner(trainer).lr_find(module, min_lr=1e-4, max_lr=0.5, num_training=15, early_stop_threshold=None)
        assert module.head.bias.item() == before
        trainer.fit_loop.max_epochs = 1
        trainer.fit(module)
        return module.lr, module.head.bias.item()

    reports = on_ranks(main)
    assert reports[0][0] != 0.01
    assert reports == [reports[0]] * 4


@pytest.mark.feature("profilers: simple, advanced, PyTorch")
@pytest.mark.parametrize("profiler", on_push([SimpleProfiler, AdvancedProfiler, PyTorchProfiler], SimpleProfiler))
def test_profilers(follows_one_device, profiler, tmp_path):
    follows_one_device(Quadratic, profiler=profiler(dirpath=tmp_path, filename="profile"), max_epochs=1)
    assert len(list(tmp_path.glob("fit-profile*"))) >= 4
    if profiler is not PyTorchProfiler:
        assert "optimizer_step" in (tmp_path / "fit-profile.txt").read_text()


@pytest.mark.feature("LightningCLI")
def test_command_line(scheme_name, scheme_arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program"])
    strategy = "--trainer.strategy"
    fields = dict(scheme_arguments)
    if "outer_optimizer" in fields:
        fields |= {"outer_optimizer": "SGD", "outer_optimizer.lr": 1.0}
    cli = LightningCLI(
        Quadratic,
        args=[
            "fit",
            "--trainer.accelerator=cpu",
            "--trainer.devices=4",
            "--trainer.max_epochs=2",
            f"--trainer.default_root_dir={tmp_path}",
            "--trainer.enable_progress_bar=false",
            f"{strategy}=lightning_hiercomm.HierarchicalStrategy",
            f"{strategy}.scheme={SCHEMES[scheme_name].__name__}",
            *(f"{strategy}.scheme.{name}={value}" for name, value in fields.items()),
            f"{strategy}.ranks_per_node=2",
            f"{strategy}.start_method=fork",
        ],
    )
    module = Quadratic()
    one_trainer(tmp_path).fit(module)
    torch.testing.assert_close(cli.model.state_dict(), module.state_dict(), rtol=1e-5, atol=1e-6)
