"""Lightning's callbacks."""

from __future__ import annotations

import copy
import os
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from pairwise import on_push
from problems import Quadratic, same_bits

from lightning_hiercomm import PeriodicAveraging


@pytest.mark.feature("LearningRateMonitor")
def test_learning_rate_monitor(fit, scheme, tmp_path):
    class Scheduled(Quadratic):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    logger = CSVLogger(tmp_path, name="", version="")
    fit(Scheduled(), {"scheme": scheme}, callbacks=[LearningRateMonitor()], logger=logger, max_epochs=3)
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("lr-SGD")
    assert [row.split(",")[column] for row in rows if row.split(",")[column]] == ["0.1", "0.05", "0.025"]


@pytest.mark.feature("WeightAveraging, EMAWeightAveraging")
@pytest.mark.parametrize(
    "average",
    [pytest.param(WeightAveraging, marks=pytest.mark.nightly), lambda: EMAWeightAveraging(decay=0.7)],
    ids=["WeightAveraging", "EMAWeightAveraging"],
)
def test_weight_averaging(follows_one_device, average):
    ours, one = follows_one_device(Quadratic, callbacks=lambda: [average()])
    assert ours[0]["metrics"]["val_loss"] == pytest.approx(one["metrics"]["val_loss"], rel=0.02)


@pytest.fixture
def checkpoints(follows_one_device, tmp_path):
    """Fit with a ModelCheckpoint: the files' names and parameters are those that one device writes."""

    def run(also=(), **arguments):
        def callbacks():
            folder = tmp_path / ("ours" if "LOCAL_RANK" in os.environ else "one")
            return [*copy.deepcopy(also), ModelCheckpoint(folder, **arguments)]

        trainer = arguments.pop("trainer", {})
        follows_one_device(partial(Quadratic, 6), callbacks=callbacks, enable_checkpointing=True, **trainer)
        files = sorted(path.name for path in (tmp_path / "one").iterdir())
        assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == files
        for name in files:
            ours, one = (torch.load(tmp_path / who / name, weights_only=True) for who in ("ours", "one"))
            torch.testing.assert_close(ours["state_dict"], one["state_dict"], rtol=1e-5, atol=1e-6)
            assert ours["global_step"] == one["global_step"]
        return files

    return run


@pytest.mark.feature("ModelCheckpoint: best k, last, every n steps, on exception")
def test_best_checkpoints(checkpoints):
    files = checkpoints(monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}", trainer={"max_epochs": 4})
    assert files == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]


@pytest.mark.feature("ModelCheckpoint: best k, last, every n steps, on exception")
def test_checkpoints_every_n_steps_hold_averaged_parameters(checkpoints):
    files = checkpoints(every_n_train_steps=5, save_top_k=-1, filename="{step}")
    assert files == ["step=10.ckpt", "step=5.ckpt"]


@pytest.mark.feature("WeightAveraging, EMAWeightAveraging")
def test_checkpoints_of_averaged_weights(checkpoints):
    checkpoints(also=[EMAWeightAveraging(decay=0.7)], every_n_train_steps=5, save_top_k=-1, filename="{step}")


@pytest.mark.feature("ModelCheckpoint: best k, last, every n steps, on exception")
@pytest.mark.parametrize("kind", on_push([OnExceptionCheckpoint, ModelCheckpoint], OnExceptionCheckpoint))
def test_checkpoint_when_all_ranks_raise(on_ranks, tmp_path, kind):
    class Failing(Quadratic):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 2:
                self.trainer.strategy.barrier()  # or ranks that are behind hear of the others' failure first
                raise ValueError("on purpose")

    def main(trainer):
        arguments = {"save_on_exception": True} if kind is ModelCheckpoint else {}
        trainer = trainer(callbacks=[kind(tmp_path, "saved", **arguments)], enable_checkpointing=True)
        with pytest.raises(ValueError, match="on purpose"):
            trainer.fit(Failing())

    on_ranks(main)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert saved["global_step"] == 3
    assert not torch.equal(saved["state_dict"]["head.bias"], Quadratic().head.bias)


class LearningRate(Quadratic):
    def on_train_end(self):
        self.report = self.lr


class LooksAgain(LearningRateFinder):
    """As Lightning's documentation does it: the finder runs again in mid-run."""

    def on_fit_start(self, *_):
        """Not then."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            before = self.held(trainer)
            self.lr_find(trainer, pl_module)
            pl_module.report = before, self.held(trainer)

    def held(self, trainer):
        state, weights = trainer.optimizers[0].state, trainer.lightning_module.parameters()
        tensors = [torch.get_rng_state(), *(t for p in weights for t in (p, state[p]["momentum_buffer"]))]
        return [tensor.detach().clone() for tensor in tensors]


class OwnMomentum(Quadratic):
    """Each rank has gradients of its own."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.global_rank)


def test_a_learning_rate_finder_in_mid_run_restores_every_rank(fit):
    strategy = {"scheme": PeriodicAveraging(4, at_epoch_end=False)}
    finder = LooksAgain(min_lr=1e-4, max_lr=0.5, num_training_steps=10, update_attr=False, early_stop_threshold=None)
    module = OwnMomentum(15, lr=0.01, momentum=0.9)
    ranks = fit(module, strategy, callbacks=[finder], max_epochs=2, enable_checkpointing=True)
    reports = [rank["report"] for rank in ranks]
    for before, after in reports:
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    (first, _), *_, (last, _) = reports
    assert not any(torch.equal(one, other) for one, other in zip(first[1:], last[1:], strict=True))


@pytest.mark.feature("LearningRateFinder")
def test_all_ranks_find_the_same_learning_rate(fit_on_ranks):
    def finder():
        return [LearningRateFinder(min_lr=1e-4, max_lr=0.5, num_training_steps=15, early_stop_threshold=None)]

    reports = fit_on_ranks(lambda: LearningRate(15), callbacks=finder, enable_checkpointing=True, max_epochs=1)
    same_bits(reports)
    assert reports[0]["report"] != 0.1
    assert [report["report"] for report in reports] == [reports[0]["report"]] * 4


@pytest.mark.feature("BatchSizeFinder, Tuner.scale_batch_size", refused=True)
def test_batch_size_finder_is_refused(fit, scheme):
    with pytest.raises(Exception, match="not supported with distributed strategies"):
        fit(Quadratic(), {"scheme": scheme}, callbacks=[BatchSizeFinder()], enable_checkpointing=True, forked=True)
