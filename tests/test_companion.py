"""A resume from a checkpoint with replicas is bit-identical with the run that was never interrupted."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiercomm import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, StepsDelay
from lightning_hiercomm.companion import companion_path

STEPS = 6  # per epoch


class Net(pl.LightningModule):
    """Random numbers (dropout), BatchNorm, momentum, and a schedule; ``report`` is a weight after each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 2)
        )
        self.report: list[list[float]] = []

    def on_fit_start(self) -> None:
        torch.manual_seed(self.global_rank)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def on_train_batch_end(self, *_: object) -> None:
        self.report.append(self.layers[0].weight[0].tolist())

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(STEPS * 4 * 2, 5, generator=generator)
        y = torch.randint(2, (len(x),), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=2)


def schemes():
    return {
        "all_reduce": AllReduce(),
        "periodic": PeriodicAveraging(4, at_epoch_end=False),
        "daso": DASO(sync_every=4, staleness=2, warmup_epochs=0, cooldown_epochs=0),
        "gossip": Gossip(segments=2),
        "gossip_overlap": Gossip(segments=2, overlap=True),
        "steps_delay": StepsDelay(delay=3, warmup_steps=3),
        "all_reduce_int8": AllReduce(),  # with buckets that DDP never cuts anew, see below
        "diloco_int4": DiLoCo(4, staleness=3),  # in flight after 6 steps
        "streaming_int8": DiLoCo(6, AdamW, fragments=2, staleness=2, outer_scheduler=Halved),
    }


AdamW = partial(torch.optim.AdamW, lr=0.02)
Halved = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)


class SaveAfter(pl.Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("name", list(schemes()))
def test_a_resume_at_the_end_of_an_epoch_is_bit_identical(fit, tmp_path, name):
    """With a narrow wire, whose last agreed values and what it keeps back are state, too.

    Without one, see compatibility/test_checkpoints.
    """
    path, wire = tmp_path / "saved.ckpt", name.rpartition("_")[2]

    def strategy():
        wire_dtype = wire if wire.startswith("int") else "bfloat16"
        arguments = {"scheme": schemes()[name], "wire_dtype": wire_dtype, "checkpoint_replicas": True}
        return {**arguments, "find_unused_parameters": "all_reduce" in name}

    whole = fit(Net(), strategy(), max_epochs=3, callbacks=[SaveAfter(STEPS, path)])
    resumed = fit(Net(), strategy(), max_epochs=3, fit_arguments={"ckpt_path": path})
    for one, other in zip(whole, resumed, strict=True):
        assert other["report"] == one["report"][STEPS:]
        for key, value in one["state_dict"].items():
            assert torch.equal(value, other["state_dict"][key]), key


def test_a_resume_from_the_agreed_parameters_alone_goes_on_from_them(fit, tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(Net(), {"scheme": PeriodicAveraging(4, at_epoch_end=False)}, max_epochs=2, callbacks=[SaveAfter(STEPS, path)])
    saved = torch.load(path, weights_only=True)
    resumed = fit(Net(), {"scheme": PeriodicAveraging(4)}, max_epochs=1, fit_arguments={"ckpt_path": path})
    for report in resumed:
        assert torch.equal(report["state_dict"]["layers.0.weight"], saved["state_dict"]["layers.0.weight"])


@pytest.mark.parametrize("nodes", [2, 1, [3, 1]], ids=str)
def test_other_nodes_go_on_with_the_outer_optimizer_of_a_plain_checkpoint(fit, tmp_path, nodes):
    path = tmp_path / "saved.ckpt"
    fit(Net(), {"scheme": DiLoCo(6, AdamW)}, callbacks=[SaveAfter(11, path)], max_epochs=2)
    saved = torch.load(path, weights_only=True)
    (scheme,) = saved["hiercomm"]["schemes"]
    outer = scheme["outer"]["state"]
    assert [state["step"].item() for state in outer] == [1.0] * 6  # one agreement before
    assert [state["exp_avg"].shape for state in outer] == [p.shape for p in Net().parameters()]
    seen = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if not seen:
                seen.append(trainer.strategy.schemes[0].schedule()["outer"]["state"])
                pl_module.report.append(seen[0])

    resumed = fit(
        Net(),
        {"scheme": DiLoCo(6, AdamW, fragments=2, staleness=1), "ranks_per_node": nodes, "bucket_mb": 1e-4},
        callbacks=[Look()],
        max_epochs=3,
        fit_arguments={"ckpt_path": path},
    )
    for report in resumed:
        for restored, before in zip(report["report"][0], outer, strict=True):
            assert restored.keys() == before.keys()
            assert all(torch.equal(restored[name], before[name]) for name in before)


def test_companions_follow_the_deletion_of_their_checkpoint(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, filename="{epoch}", monitor=None, every_n_epochs=1, save_top_k=1)
    fit(Net(), {"checkpoint_replicas": True}, max_epochs=3, callbacks=[callback], enable_checkpointing=True)
    assert sorted(path.name for path in tmp_path.glob("epoch*")) == [
        "epoch=2.ckpt",
        *(f"epoch=2.ckpt.rank-{rank:04d}" for rank in range(4)),
    ]


def test_a_missing_companion_a_foreign_one_other_nodes_and_other_settings_are_refused(fit, tmp_path):
    path, other = tmp_path / "saved.ckpt", tmp_path / "other.ckpt"
    strategy = {"scheme": PeriodicAveraging(4), "checkpoint_replicas": True}
    for target in (path, other):
        fit(Net(), strategy, callbacks=[SaveAfter(2, target)])

    with pytest.raises(Exception, match="but this run has"):
        fit(Net(), {**strategy, "ranks_per_node": [3, 1]}, fit_arguments={"ckpt_path": path})
    with pytest.raises(Exception, match=r"saved with .*bucket_mb=4.* but this run has .*bucket_mb=1,"):
        fit(Net(), {**strategy, "bucket_mb": 1}, fit_arguments={"ckpt_path": path})
    Path(companion_path(other, 1)).replace(companion_path(path, 1))
    with pytest.raises(Exception, match="belongs to another checkpoint"):
        fit(Net(), strategy, fit_arguments={"ckpt_path": path})
    Path(companion_path(path, 1)).unlink()
    with pytest.raises(Exception, match=r"rank-0001.* is missing. Set checkpoint_replicas=False"):
        fit(Net(), strategy, fit_arguments={"ckpt_path": path})
