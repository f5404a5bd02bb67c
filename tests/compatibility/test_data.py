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

    def __init__(self) -> None:
        super().__init__()
        self.trained = self.validated = 0
        self.seen = []

    def on_train_batch_end(self, *_):
        self.trained += 1

    def on_validation_batch_end(self, *_):
        self.validated += 1

    def on_validation_epoch_end(self):
        self.seen.append(round(float(self.trainer.callback_metrics["val_loss"]), 4))

    def on_train_end(self):
        self.report = (self.trained, self.validated, self.seen)


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("arguments", "trained", "validated"),
    [
        pytest.param({"val_check_interval": 0.5}, 8, 8, marks=pytest.mark.feature("val_check_interval")),
        pytest.param({"check_val_every_n_epoch": 2}, 8, 2, marks=[pytest.mark.feature("val_check_interval"), NIGHTLY]),
        pytest.param(
            {"val_check_interval": 3, "check_val_every_n_epoch": None},
            8,
            4,
            marks=[pytest.mark.feature("val_check_interval"), NIGHTLY],
        ),
        pytest.param({"overfit_batches": 2}, 4, 4, marks=[pytest.mark.feature("overfit_batches"), NIGHTLY]),
        pytest.param({"fast_dev_run": 3}, 3, 2, marks=pytest.mark.feature("fast_dev_run")),
        pytest.param(
            {"limit_train_batches": 0.5, "limit_val_batches": 1},
            4,
            2,
            marks=[pytest.mark.feature("limit_train/val_batches"), NIGHTLY],
        ),
        pytest.param({"limit_val_batches": 0}, 8, 0, marks=[pytest.mark.feature("limit_train/val_batches"), NIGHTLY]),
        pytest.param({"max_steps": 7}, 7, 2, marks=pytest.mark.feature("max_steps")),
        pytest.param({"max_steps": 4, "max_epochs": -1}, 4, 2, marks=[pytest.mark.feature("max_steps"), NIGHTLY]),
        pytest.param(
            {"max_steps": 3, "accumulate_grad_batches": 2}, 6, 2, marks=[pytest.mark.feature("max_steps"), NIGHTLY]
        ),
        pytest.param(
            {"min_epochs": 3, "max_epochs": 3}, 12, 6, marks=[pytest.mark.feature("max_epochs, min_epochs"), NIGHTLY]
        ),
    ],
    ids=str,
)
def test_how_long_it_trains_and_validates(follows_one_device, arguments, trained, validated):
    ours, one = follows_one_device(Counting, **arguments)
    assert one["report"][:2] == (trained, validated)
    for report in ours:
        assert report["report"][:2] == (trained, validated)
        assert report["report"][2] == pytest.approx(one["report"][2], abs=2e-4)


@pytest.mark.feature("max_time", note="its clock is rank 0's, broadcast over all nodes after every batch")
def test_max_time_stops_all_ranks_after_the_same_step(fit_on_ranks):
    reports = fit_on_ranks(Counting, max_time=timedelta(seconds=0.1), max_epochs=-1)
    same_bits(reports)
    assert reports[0]["report"][0] > 0
    assert len({report["report"][0] for report in reports}) == 1
