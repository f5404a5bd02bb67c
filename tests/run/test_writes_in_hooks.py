"""What hooks write over the averaged model, in a validation or a save, is undone, unless callbacks swap back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from pairwise import on_push, requested
from problems import one_trainer, warnings_with
from runs import add, on_two_nodes, scalar, with_buffers
from torch import nn
from torch.utils.data import DataLoader

from lightning_hiercomm import DASO, AllReduce, DiLoCo, Gossip, HierarchicalStrategy, PeriodicAveraging, StepsDelay
from lightning_hiercomm.run.training_run import TrainingRun

SCHEMES = {
    "all_reduce": AllReduce,
    "periodic": partial(PeriodicAveraging, 3),
    "daso": partial(DASO, 3, warmup=0, cooldown=0),
    "diloco": partial(DiLoCo, 3),
    "gossip": partial(Gossip, fragments=2),
    "steps_delay": partial(StepsDelay, 2, warmup_steps=2),
}
WARNED = "what was written to the averaged model"


class Written(pl.LightningModule):
    """Trains ``moves`` towards the rank; ``still`` is trained, too, but has a learning rate of zero.

    Args:
        writes: What is written in the validation, or the save, of each number.
    """

    def __init__(self, writes: dict[int, str]) -> None:
        super().__init__()
        self.moves = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.still = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.teacher = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(1, affine=False)
        self.writes = writes
        self.validations = 0
        self.validated: dict[str, torch.Tensor] = {}
        self.before: dict[str, torch.Tensor] = {}
        self.is_synchronized = False
        self.report: dict[int, Any] = {}

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.state_dict().items()}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.norm(batch + self.global_rank)
        if self.validated:
            self.report[self.validations] = self.is_synchronized, self.before, self.validated, self.after
            self.validated = {}
        return (self.moves - self.global_rank - 1).square().sum() + self.still.square().sum()

    def on_train_batch_start(self, *_: object) -> None:
        self.after = self.state()  # before DDP broadcasts buffers

    def on_train_batch_end(self, *_: object) -> None:
        with torch.no_grad():
            self.teacher.fill_(10.0 * self.global_rank)
        self.before = self.state()
        self.is_synchronized = self.trainer.strategy.schemes[0].state.is_synchronized

    def write(self, hook: str) -> None:
        """Write what belongs to the present validation in this hook."""
        how, value = self.writes.get(self.validations, ""), 10.0 * self.validations
        if how == hook:
            with torch.no_grad():
                self.still.fill_(value)
        elif (how, hook) == ("data", "on_validation_epoch_end"):
            self.still.data = torch.full_like(self.still, value)
        elif (how, hook) == ("state", "on_validation_epoch_start"):
            self.load_state_dict({**self.state_dict(), "still": torch.full((3,), value)})
        elif (how, hook) == ("statistics", "on_validation_end"):
            self.norm.running_mean.fill_(value)
        elif (how, hook) == ("teacher", "on_validation_end"):
            self.teacher.data.fill_(value)

    def on_validation_start(self) -> None:
        self.validations += not self.trainer.sanity_checking
        self.write("on_validation_start")

    def on_validation_epoch_start(self) -> None:
        self.write("on_validation_epoch_start")

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated = self.state()
        self.log("val_loss", self.moves.sum(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.write("on_validation_epoch_end")

    def on_validation_end(self) -> None:
        self.write("on_validation_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [self.moves]}, {"params": [self.still], "lr": 0.0}], lr=0.05)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(2 * 30 * self.trainer.world_size, 1), batch_size=2)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(self.trainer.world_size, 1))


WRITES = {
    2: "on_validation_start",
    3: "on_validation_end",
    4: "state",
    5: "data",
    7: "on_validation_end",
    8: "statistics",
    10: "teacher",
}


def _program(names: list[str], folder: Path) -> dict[str, Any]:
    said = {}
    for name in names:
        module = Written(WRITES)
        strategy = HierarchicalStrategy(SCHEMES[name](), ranks_per_node=1)
        with warnings_with(WARNED) as warned:
            one_trainer(folder, devices=2, strategy=strategy, max_epochs=1, val_check_interval=2).fit(module)
        said[name] = {"report": module.report, "warned": warned}
    return said


@pytest.fixture(scope="module")
def ranks(borrow: Any, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    names = sorted({name for (name,) in requested(request, "name")} & {*SCHEMES})
    return borrow(partial(_program, names), 2)


@pytest.mark.parametrize("name", on_push(SCHEMES, "periodic", "steps_delay"))
def test_training_continues_from_own_values_after_writes_in_a_validation(ranks, name):
    for rank in ranks:
        undone = 0
        for number, (is_synchronized, before, _, after) in rank[name]["report"].items():
            assert before.keys() == after.keys()
            undone += not is_synchronized and number in WRITES
            for key in before:
                if key != "still" or not is_synchronized:
                    assert torch.equal(before[key], after[key]), (number, key)
        assert undone >= 2


@pytest.mark.parametrize("name", on_push(["periodic", "diloco"], "periodic"))
def test_a_write_right_after_a_synchronization_stays(ranks, name):
    for rank in ranks:
        is_synchronized, _, _, after = rank[name]["report"][3]
        assert is_synchronized
        assert after["still"].tolist() == [30.0] * 3


@pytest.mark.parametrize("name", on_push(SCHEMES, "periodic", "steps_delay"))
def test_rank_0_warns_once_of_undone_writes(ranks, name):
    first, other = (rank[name]["warned"] for rank in ranks)
    assert len(first) == 1
    assert other == []


class Sane(Written):
    """Writes in the sanity check, before training."""

    def on_validation_end(self) -> None:
        if self.trainer.sanity_checking:
            self.still.data.fill_(3.0)
        elif self.trainer.state.fn == "validate":
            self.still.data.fill_(4.0 + self.global_rank)


def _outside_of_training(folder: Path) -> list[Any]:
    module = Sane({})
    strategy = HierarchicalStrategy(PeriodicAveraging(4), ranks_per_node=1)
    trainer = one_trainer(folder, devices=2, strategy=strategy, max_steps=5, num_sanity_val_steps=1)
    trainer.fit(module)
    fitted = module.still.tolist()
    trainer.validate(module, verbose=False)
    return [fitted, module.still.tolist()]


def test_writes_in_a_sanity_check_or_outside_fit_are_kept(borrow):
    for rank, said in enumerate(borrow(_outside_of_training, 2)):
        assert said == [[3.0] * 3, [4.0 + rank] * 3]


class WrittenInSaves(Written):
    """Writes in ``on_save_checkpoint``."""

    def on_train_batch_start(self, *_: object) -> None:
        super().on_train_batch_start()
        if self.trainer.global_step in (2, 4):
            self.validations += 1
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / f"{self.validations}.ckpt")
            self.after = self.state()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.validated = self.state()
        self.write("on_save_checkpoint")


def _saving_program(folder: Path) -> dict[str, Any]:
    module = WrittenInSaves({2: "on_save_checkpoint"})
    strategy = HierarchicalStrategy(PeriodicAveraging(100), ranks_per_node=1)
    with warnings_with(WARNED) as warned:
        one_trainer(folder, devices=2, strategy=strategy, max_steps=6, limit_val_batches=0).fit(module)
    saved = [torch.load(folder / f"{number}.ckpt", weights_only=True)["state_dict"] for number in (1, 2)]
    return {"report": module.report, "warned": warned, "saved": saved}


def test_writes_in_on_save_checkpoint_reach_the_file_alone(borrow):
    said = borrow(_saving_program, 2)
    for rank in said:
        assert rank["report"].keys() == {1, 2}
        for _, before, saved, after in rank["report"].values():
            assert all(torch.equal(before[key], after[key]) for key in before)
            assert not torch.equal(before["moves"], saved["moves"])
    assert [state["still"].tolist() for state in said[0]["saved"]] == [[0.0] * 3, [20.0] * 3]
    assert [len(rank["warned"]) for rank in said] == [1, 0]


def _validated(scheme: Any, write: Callable[[nn.Module], None], **more: Any) -> list[Any]:
    """Return what a module holds after a validation that writes to it, in its second step, and after twelve steps."""

    def work(run: TrainingRun) -> list[Any]:
        module = run.module
        for step in range(12):
            add(run, 0, 1.0 + run.topology.rank)
            if step == 1:
                before = module.weight.item()
                with torch.inference_mode(), run.averaged_model():  # in which Lightning validates with nccl
                    write(module)
                held = module.weight.item() - before, module.best.tolist()
        run.finish()
        return [*held, module.weight.item()]

    return on_two_nodes(scheme, work, lambda: with_buffers(scalar(), best=torch.zeros(2)), **more)


@pytest.mark.parametrize("scheme", ["periodic", "diloco", "steps_delay"])
def test_training_continues_after_a_write_in_inference_mode(scheme):
    with pytest.warns(UserWarning, match=f"weight: {WARNED}"):
        written = _validated(SCHEMES[scheme](), lambda module: module.weight.data.fill_(100.0))
    assert written == _validated(SCHEMES[scheme](), lambda module: None)
    assert [moved for moved, _, _ in written] == [0.0] * 2


@pytest.mark.parametrize("average_buffers", [True, False])
def test_a_buffer_written_in_a_validation_stays_if_it_is_not_averaged(average_buffers):
    def write(module: nn.Module) -> None:
        module.best = module.best + torch.tensor([1.0, 2.0])
        module.best.copy_(module.best.flip(0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks = _validated(PeriodicAveraging(5), write, average_buffers=average_buffers)
    assert [best for _, best, _ in ranks] == [[0.0, 0.0] if average_buffers else [2.0, 1.0]] * 2
    assert [str(each.message).partition(":")[0] for each in caught] == ["best"] * average_buffers


def test_weights_that_are_swapped_in_and_out_are_not_written():
    def swap(module: nn.Module) -> None:
        trained = module.weight.detach().clone()
        module.weight.data.copy_(torch.full_like(trained, 7.0))
        module.weight.data.copy_(trained)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _validated(PeriodicAveraging(100), swap) == _validated(PeriodicAveraging(100), lambda module: None)
