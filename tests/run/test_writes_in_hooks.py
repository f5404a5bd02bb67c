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
from problems import Drifting, one_trainer, warnings_with
from runs import add, on_two_nodes, scalar, with_buffers
from torch import nn

from lightning_hiercomm import DASO, DiLoCo, Gossip, HierarchicalStrategy, PeriodicAveraging, StepsDelay
from lightning_hiercomm.run.training_run import TrainingRun

SCHEMES = {
    "periodic": partial(PeriodicAveraging, 3),
    "daso": partial(DASO, 3, warmup=0, cooldown=0),
    "diloco": partial(DiLoCo, 3),
    "gossip": partial(Gossip, fragments=2, overlap=True),
    "steps_delay": partial(StepsDelay, 2, warmup_steps=2),
}
WARNED = "what was written to the averaged model"
WRITES: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda module: module.weight.data.fill_(100.0),
    "new data": lambda module: setattr(module.weight, "data", torch.full_like(module.weight, 100.0)),
    "state": lambda module: module.load_state_dict({**module.state_dict(), "weight": torch.full((1, 1), 100.0)}),
    "statistics": lambda module: module.mean.fill_(100.0),
    "teacher": lambda module: module.teacher.data.fill_(100.0),
}


def _with_teacher() -> nn.Module:
    module = with_buffers(scalar(), best=torch.zeros(2), mean=torch.zeros(1))
    module.teacher = nn.Parameter(torch.zeros(1), requires_grad=False)
    return module


def _validated(
    scheme: Any, write: Callable[[nn.Module], object], mode: Callable[[], Any] = torch.no_grad, **more: Any
) -> list[Any]:
    """Validate after the second of twelve steps, and write to the module meanwhile.

    Returns:
        Of each rank what training goes on from, whether these are its own values, the buffer ``best``, and the weight
        at the end.
    """

    def work(run: TrainingRun) -> list[Any]:
        module = run.module
        for step in range(12):
            add(run, 0, 1.0 + run.topology.rank)
            module.mean.fill_(run.topology.rank)
            module.teacher.data.fill_(run.topology.rank)
            if step == 1:
                before = [module.weight.item(), module.mean.item(), module.teacher.item()]
                with mode(), run.averaged_model():
                    write(module)
                held, best = [module.weight.item(), module.mean.item(), module.teacher.item()], module.best.tolist()
        run.finish()
        return [held, held == before, best, module.weight.item()]

    return on_two_nodes(scheme, work, _with_teacher, **more)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", SCHEMES)
def test_training_continues_from_own_values_after_a_write(name, write):
    with warnings_with(WARNED) as warned:
        written = _validated(SCHEMES[name](), WRITES[write])
    assert len(warned) == 1  # of rank 0
    assert written == _validated(SCHEMES[name](), lambda module: None)
    assert all(are_own for _, are_own, _, _ in written)


@pytest.mark.parametrize("name", ["periodic", "diloco", "steps_delay"])
def test_training_continues_after_a_write_in_inference_mode(name):  # in which Lightning validates with nccl
    with pytest.warns(UserWarning, match=f"weight: {WARNED}"):
        written = _validated(SCHEMES[name](), WRITES["in place"], torch.inference_mode)
    assert written == _validated(SCHEMES[name](), lambda module: None, torch.inference_mode)


@pytest.mark.parametrize("scheme", [PeriodicAveraging(2), DiLoCo(2)], ids=repr)
def test_a_write_right_after_a_synchronization_stays(scheme):
    assert [held[0] for held, *_ in _validated(scheme, WRITES["in place"])] == [100.0] * 2


@pytest.mark.parametrize("average_buffers", [True, False])
def test_a_buffer_written_in_a_validation_stays_if_it_is_not_averaged(average_buffers):
    def write(module: nn.Module) -> None:
        module.best = module.best + torch.tensor([1.0, 2.0])
        module.best.copy_(module.best.flip(0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks = _validated(PeriodicAveraging(5), write, torch.inference_mode, average_buffers=average_buffers)
    assert [best for _, _, best, _ in ranks] == [[0.0, 0.0] if average_buffers else [2.0, 1.0]] * 2
    assert [str(each.message).partition(":")[0] for each in caught] == ["best"] * average_buffers


def test_weights_that_are_swapped_in_and_out_are_not_written():
    def swap(module: nn.Module) -> None:
        trained = module.weight.detach().clone()
        module.weight.data.copy_(torch.full_like(trained, 7.0))
        module.weight.data.copy_(trained)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _validated(PeriodicAveraging(100), swap) == _validated(PeriodicAveraging(100), lambda module: None)


# ---- in a Trainer ----------------------------------------------------------------------------------------------------


class Written(Drifting):
    """Has ``still`` too, without a gradient, which is written in one hook of each validation.

    Args:
        hooks: One for each validation, or save.
        saves_to: Where it is saved after the second step.
    """

    def __init__(self, *hooks: str, saves_to: Path | None = None) -> None:
        super().__init__(steps=10)
        self.still = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.hooks, self.saves_to = hooks, saves_to
        self.own = [self.values()]
        self.goes_on: list[bool] = []

    def write(self, hook: str) -> None:
        now = self.trainer.global_step // 2 - 1
        if 0 <= now < len(self.hooks) and self.hooks[now] == hook:
            self.still.data.fill_(10.0)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 0 * self.still.sum()

    def on_train_batch_start(self, *_: object) -> None:
        if self.saves_to is not None and self.trainer.global_step == 2:
            self.trainer.save_checkpoint(self.saves_to)
        self.goes_on.append(torch.equal(self.values(), self.own[-1]))


HOOKS = ("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end")
for _hook in (*HOOKS, "on_save_checkpoint"):
    setattr(Written, _hook, lambda self, *_, hook=_hook: self.write(hook))


def _fit(folder: Path, module: Written, **arguments: Any) -> tuple[pl.Trainer, list[str]]:
    strategy = HierarchicalStrategy(PeriodicAveraging(100, at_epoch_end=False), ranks_per_node=1)
    trainer = one_trainer(folder, devices=2, strategy=strategy, **{"max_epochs": 1, **arguments})
    with warnings_with(WARNED) as warned:
        trainer.fit(module)
    return trainer, warned


def _written_in_validations(folder: Path) -> tuple[list[bool], list[str]]:
    module = Written(*HOOKS)
    _, warned = _fit(folder, module, val_check_interval=2)
    return module.goes_on, warned


def test_training_continues_after_writes_in_each_hook_of_a_validation(borrow):
    ranks = borrow(_written_in_validations, 2)
    assert [goes_on for goes_on, _ in ranks] == [[True] * 10] * 2
    assert [len(warned) for _, warned in ranks] == [1, 0]


def _written_in_a_save(folder: Path) -> tuple[list[bool], list[str], list[float]]:
    module = Written("on_save_checkpoint", saves_to=folder / "saved.ckpt")
    _, warned = _fit(folder, module, limit_val_batches=0)
    return module.goes_on, warned, torch.load(module.saves_to, weights_only=True)["state_dict"]["still"].tolist()


def test_writes_in_on_save_checkpoint_reach_the_file_alone(borrow):
    ranks = borrow(_written_in_a_save, 2)
    assert [goes_on for goes_on, *_ in ranks] == [[True] * 10] * 2
    assert [len(warned) for _, warned, _ in ranks] == [1, 0]
    assert ranks[0][2] == [10.0] * 3


class Sane(Written):
    """Writes in the sanity check, before training, and in a validation after it."""

    def on_validation_end(self) -> None:
        if self.trainer.sanity_checking:
            self.still.data.fill_(3.0)
        elif self.trainer.state.fn == "validate":
            self.still.data.fill_(4.0 + self.global_rank)


def _written_outside_of_training(folder: Path) -> list[Any]:
    module = Sane()
    trainer, _ = _fit(folder, module, max_steps=5, num_sanity_val_steps=1)
    fitted = module.still.tolist()
    trainer.validate(module, verbose=False)
    return [fitted, module.still.tolist()]


def test_writes_in_a_sanity_check_or_outside_fit_are_kept(borrow):
    for rank, said in enumerate(borrow(_written_outside_of_training, 2)):
        assert said == [[3.0] * 3, [4.0 + rank] * 3]
