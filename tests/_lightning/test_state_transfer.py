"""A Trainer goes on from another one's state as that one does: same loops, schedulers, callbacks and parameters."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from _lightning.conftest import quiet
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage
from problems import Stream, warnings_with
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hiercomm._lightning.state_transfer import (
    begin_as,
    end_training,
    note_stage_of_dataloaders,
    reload_train_data_when_due,
    skip_sanity_check,
    state_of,
    take_state,
)
from lightning_hiercomm._lightning.trainer import put_callback_first, restore_trainer
from lightning_hiercomm.elastic.transport import packed, unpacked


class Net(pl.LightningModule):
    """Sees the same data in every batch, so it does not matter that a healed one begins its loader again."""

    def __init__(self, schedule: str = "steps") -> None:
        super().__init__()
        self.schedule = schedule
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(1), persistent=False)  # which no checkpoint holds
        self.rates: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.steps += 1
        return self.layer(batch[0]).square().sum()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.layer(batch[0]).square().sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        if self.schedule == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}
        interval = "step" if self.schedule == "steps" else "epoch"
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


class Healing(SingleDeviceStrategy):
    """Takes a state up where an elastic strategy does."""

    state: dict[str, Any] | None = None

    def on_train_start(self) -> None:
        if self.state is not None:
            begin_as(self.lightning_module.trainer, self.state)

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if self.state is not None:
            take_state(trainer, self.state)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.state is not None:
            skip_sanity_check(self.lightning_module.trainer)
            if self.state["moment"] == "end":
                end_training(self.lightning_module.trainer)


class Boundary(pl.Callback):
    """Makes states where an elastic strategy does, after some optimizer steps."""

    def __init__(self, at: int) -> None:
        self.at, self.made = at, None

    def look(self, trainer: pl.Trainer, moment: str) -> None:
        if trainer.global_step == self.at and self.made is None:
            self.made = unpacked(packed(state_of(trainer, moment)))

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.look(trainer, "epoch")

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, index: int) -> None:
        self.look(trainer, "batch" if index else "epoch")

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.look(trainer, "end")


def healing_trainer(state: dict[str, Any] | None, at: int, **settings: Any) -> tuple[pl.Trainer, Boundary]:
    """A Trainer that begins as ``state``, and what makes a state after ``at`` optimizer steps."""
    strategy, boundary = Healing(), Boundary(at)
    strategy.state = state
    trainer = quiet(strategy=strategy, **{"num_sanity_val_steps": 2, "enable_checkpointing": True, **settings})
    put_callback_first(trainer, boundary)
    return trainer, boundary


def data(samples: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(samples, 4)))


def fit(folder, schedule: str, at: int, state: dict[str, Any] | None = None, **settings: Any):
    """Train; what the callback made at that step, and all by which two runs may differ."""
    model = Net(schedule)
    stops, saves = EarlyStopping("val", patience=100), ModelCheckpoint(folder, monitor="val")
    trainer, boundary = healing_trainer(state, at, callbacks=[stops, saves], **{"max_epochs": 4, **settings})
    trainer.fit(model, data(6), data(2))
    loops = trainer.fit_loop.state_dict()
    return boundary.made, {
        "loops": {key: value for key, value in loops.items() if "val_loop" not in key},
        "parameters": [parameter.tolist() for parameter in model.parameters()],
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "steps": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped),
        "stopping": stops.state_dict(),
        "saved": saves.state_dict()["best_model_score"].item(),
        "buffer": model.steps.item(),
        "rates": model.rates,
    }


@pytest.mark.pairwise
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "at"),
    [
        ({}, 4),
        ({}, 6),
        ({}, 11),
        ({"val_check_interval": 2}, 4),
        ({"val_check_interval": 3}, 7),
        ({"accumulate_grad_batches": 2}, 2),
        ({"accumulate_grad_batches": 2}, 3),
        ({"accumulate_grad_batches": 2, "val_check_interval": 2}, 4),
        ({"max_epochs": -1, "max_steps": 20}, 13),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["steps", "epochs", "plateau"])
def test_a_healed_trainer_and_one_healed_from_it_end_equal(tmp_path, settings, at, schedule):
    state, undisturbed = fit(tmp_path, schedule, at, **settings)
    assert state is not None
    rates = undisturbed.pop("rates")
    second, healed = fit(tmp_path, schedule, at + 3, state, **settings)
    own = healed.pop("rates")
    assert own == rates[len(rates) - len(own) :]
    assert healed == undisturbed
    assert second is not None
    _, healed_again = fit(tmp_path, schedule, -1, second, **settings)
    healed_again.pop("rates")
    assert healed_again == undisturbed


class Unfreezes(pl.Callback):
    """As programs do it that train a head first."""

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.layer.bias.requires_grad_(False)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.layer.bias.requires_grad_(True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("at", [4, 8, 9, 11])
def test_a_healed_trainer_decides_by_state_outside_of_checkpoints(tmp_path, at):
    """Metrics of an earlier validation, what a ModelCheckpoint saved last, accumulation, and what is unfrozen."""

    class Model(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            config = {"scheduler": scheduler, "monitor": "val", "interval": "step", "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": config}

    class Saves(ModelCheckpoint):
        def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
            saved.append(trainer.global_step)
            super()._save_checkpoint(trainer, filepath)

    saved: list[int] = []

    def fit_from(state: dict[str, Any] | None, at: int):
        saved.clear()
        saves = Saves(tmp_path, "{step}", "val", every_n_train_steps=2, save_top_k=-1, save_last=True)
        callbacks = [saves, GradientAccumulationScheduler({0: 2}), Unfreezes()]
        trainer, boundary = healing_trainer(state, at, max_epochs=5, check_val_every_n_epoch=2, callbacks=callbacks)
        trainer.fit(model := Model(), data(6), data(2))
        parameters = [parameter.tolist() for parameter in model.parameters()]
        return boundary.made, (parameters, trainer.global_step, model.layer.bias.requires_grad), [*saved]

    state, undisturbed, all_saved = fit_from(None, at)
    assert state is not None
    _, healed, own = fit_from(state, -1)
    assert healed == undisturbed
    assert own == [step for step in all_saved if step > at]


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_joins_a_finished_run_gets_its_parameters(tmp_path):
    state, undisturbed = fit(tmp_path, "steps", 24)
    assert state["moment"] == "end"
    _, healed = fit(tmp_path, "steps", -1, state)
    assert healed["parameters"] == undisturbed["parameters"]
    assert healed["rates"] == []
    assert healed["steps"][0] == 24


def test_state_that_needs_unpickling_is_excluded_and_named(tmp_path):
    class Odd(pl.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"odd": Net()}

    trainer = quiet(max_epochs=1, callbacks=[Odd()])
    trainer.fit(Net(), data(2), data(2))
    with pytest.warns(UserWarning, match=r"a joining node begins without the state of .*Odd, which"):
        state = unpacked(packed(state_of(trainer, "end")))
    assert [key for key in state["checkpoint"]["callbacks"] if "Odd" in key] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_healed_trainer_loads_the_rest_of_the_epoch(tmp_path, workers):
    """In the order of that epoch: workers begin before Lightning tells a sampler which one it is."""
    seen: list[list[int]] = [[]]

    class Model(Net):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            seen[0].append(int(batch[0][0, 0]))
            return self.layer(batch[0] / 24).square().sum()

    def fit_from(state: dict[str, Any] | None, at: int):
        seen[0] = []
        trainer, boundary = healing_trainer(state, at, max_epochs=3, enable_checkpointing=False)
        done = trainer.fit_loop.epoch_loop.batch_progress.current
        note_stage_of_dataloaders(trainer, [None], lambda: 0 if state is None else done.ready)
        samples = TensorDataset(torch.arange(24.0).repeat(4, 1).T)
        share = DistributedSampler(samples, num_replicas=2, rank=1, shuffle=True)
        trainer.fit(Model(), DataLoader(samples, batch_size=2, sampler=share, num_workers=workers))
        return boundary.made, seen[0]

    state, undisturbed = fit_from(None, 6 + 2)
    assert len(undisturbed) == 18
    assert sorted(undisturbed[:6]) != sorted(undisturbed[6:12]), "each epoch has an order of its own"
    with warnings_with("resuming from a checkpoint that ended before the epoch") as said:
        _, healed = fit_from(state, -1)
    assert healed == undisturbed[8:]
    assert said == [], "its place in the data is known"


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_healed_trainer_begins_a_stream_again(batch_size):
    """In batches it has a sampler, too, of no length; which ended a node that came inside an epoch."""
    trainer = quiet()
    note_stage_of_dataloaders(trainer, [None], lambda: 2)
    loader = DataLoader(Stream(range(6)), batch_size)
    made = trainer._data_connector._prepare_dataloader(loader, shuffle=False, mode=RunningStage.TRAINING)
    assert [int(each) for batch in made for each in torch.atleast_1d(torch.as_tensor(batch))] == [*range(6)]


@pytest.mark.filterwarnings("ignore")
def test_train_data_are_drawn_again_before_an_epoch_where_that_is_due():
    lengths = [6, 4, 4]
    asked: list[int] = []

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return data(lengths[min(len(asked) - 1, 2)])

    def is_due() -> bool:
        asked.append(trainer.current_epoch)
        return len(asked) == 3

    trainer = quiet(max_epochs=3)
    reload_train_data_when_due(trainer, is_due)
    trainer.fit(Net(), Data())
    assert asked == [0, 0, 1, 2], "when the run begins, and before each epoch"
    assert trainer.global_step == 6 + 4 + 4
    restore_trainer(trainer)
    assert "setup_data" not in vars(trainer.fit_loop)
