"""sync_every="auto" where ranks are processes."""

from __future__ import annotations

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from problems import Quadratic
from torch.multiprocessing import ProcessRaisedException

from lightning_hiercomm import PeriodicAveraging


class Watching(pl.Callback):
    """Reports the period after every step, as the module's report."""

    def on_train_start(self, trainer, pl_module):
        pl_module.report = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        scheme = trainer.strategy.schemes[0]
        pl_module.report.append(scheme.period if scheme.tuner is None else "auto")


def test_every_rank_chooses_the_same_period_and_a_resumed_run_keeps_it(fit, tmp_path):
    train = partial(
        fit,
        strategy={"scheme": PeriodicAveraging("auto", overhead_target=0.2)},
        callbacks=[Watching(), ModelCheckpoint(tmp_path, filename="last", save_top_k=1)],
        enable_checkpointing=True,
    )
    first = [report["report"] for report in train(Quadratic(steps=24))]
    assert all(report == first[0] for report in first)
    assert first[0][:19] == ["auto"] * 19  # the fifth synchronization comes after the 20th step
    chosen = first[0][-1]
    assert isinstance(chosen, int)

    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["hiercomm"]["schemes"][0]["tuned_period"] == chosen
    resumed = train(Quadratic(steps=24), max_epochs=2, fit_arguments={"ckpt_path": tmp_path / "last.ckpt"})
    assert [report["report"] for report in resumed] == [[chosen] * 24] * 4


def test_epochs_that_are_too_short_are_refused(fit):
    strategy = {"scheme": PeriodicAveraging("auto", at_epoch_end=False), "ranks_per_node": 1}
    with pytest.raises(ProcessRaisedException, match="exchanges that are 4 optimizer steps apart, but an epoch has 2"):
        fit(Quadratic(steps=2), strategy, devices=2)
