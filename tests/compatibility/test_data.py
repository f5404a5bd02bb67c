"""Where batches come from, and how many."""

from __future__ import annotations

from datetime import timedelta

import pytest
from lightning.pytorch.utilities import CombinedLoader
from problems import Quadratic, same_bits


class Several(Quadratic):
    """Half a step's loss is on samples of a second loader, which is shorter and starts again."""

    def train_dataloader(self):
        loaders = {
            "long": self.loader(self.samples(self.steps, 1), shuffle=True),
            "short": self.loader(self.samples(2, 5), shuffle=True),
        }
        return CombinedLoader(loaders, "max_size_cycle")

    def training_step(self, batch, batch_idx):
        return self.loss(batch["long"][0]) + self.loss(batch["short"][0])

    def val_dataloader(self):
        return [self.loader(self.samples(2, 2)), self.loader(self.samples(1, 3))]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)


@pytest.mark.feature("several dataloaders (CombinedLoader)")
def test_several_dataloaders(follows_one_device):
    ours, one = follows_one_device(Several)
    for name in ("val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"):
        assert ours[0]["metrics"][name] == pytest.approx(one["metrics"][name])


class Counting(Quadratic):
    """Reports the number of batches trained and validated, and what validation saw."""

    trained = validated = 0

    def on_train_start(self):
        self.seen = []

    def on_train_batch_end(self, *_):
        self.trained += 1

    def on_validation_batch_end(self, *_):
        self.validated += 1

    def on_validation_epoch_end(self):
        self.seen.append(round(float(self.trainer.callback_metrics["val_loss"]), 4))

    def on_train_end(self):
        self.report = (self.trained, self.validated, self.seen)


feature, nightly = pytest.mark.feature, pytest.mark.nightly


def row(marks, trained, validated, **arguments):
    return pytest.param(arguments, trained, validated, marks=marks)


@pytest.mark.parametrize(
    ("arguments", "trained", "validated"),
    [
        row(feature("val_check_interval"), 8, 8, val_check_interval=0.5),
        row([feature("val_check_interval"), nightly], 8, 2, check_val_every_n_epoch=2),
        row([feature("val_check_interval"), nightly], 8, 4, val_check_interval=3, check_val_every_n_epoch=None),
        row([feature("overfit_batches"), nightly], 4, 4, overfit_batches=2),
        row(feature("fast_dev_run"), 3, 2, fast_dev_run=3),
        row([feature("limit_train/val_batches"), nightly], 4, 2, limit_train_batches=0.5, limit_val_batches=1),
        row([feature("limit_train/val_batches"), nightly], 8, 0, limit_val_batches=0),
        row(feature("max_steps"), 7, 2, max_steps=7),
        row([feature("max_steps"), nightly], 4, 2, max_steps=4, max_epochs=-1),
        row([feature("max_steps"), nightly], 6, 2, max_steps=3, accumulate_grad_batches=2),
        row([feature("max_epochs, min_epochs"), nightly], 12, 6, min_epochs=3, max_epochs=3),
    ],
    ids=str,
)
def test_how_long_it_trains_and_validates(follows_one_device, arguments, trained, validated):
    ours, one = follows_one_device(Counting, **arguments)
    assert one["report"][:2] == (trained, validated)
    for report in ours:
        assert report["report"][:2] == (trained, validated)
        assert report["report"][2] == pytest.approx(one["report"][2], abs=2e-4)


@pytest.mark.feature("max_time")
def test_max_time_stops_all_ranks_after_the_same_step(fit_on_ranks):
    reports = fit_on_ranks(Counting, max_time=timedelta(seconds=0.1), max_epochs=-1)
    same_bits(reports)
    assert reports[0]["report"][0] > 0
    assert len({report["report"][0] for report in reports}) == 1
