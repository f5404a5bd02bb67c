"""The module of a program of :mod:`programs`, and the actions of its hooks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader

EPOCHS, BATCHES = 2, 3
LAYOUTS = {"1x1": [1], "1x2": [2], "2x1": [1, 1], "2x2": [2, 2], "3x1": [1, 1, 1], "2+1": [2, 1]}
"""Ranks of every node."""
EPOCH_HOOKS = (
    *("on_train_epoch_start", "on_validation_start", "on_validation_epoch_end", "on_validation_end"),
    "on_train_epoch_end",
)
BATCH_HOOKS = ("on_train_batch_start", "training_step", "on_before_optimizer_step", "on_train_batch_end")
HOOKS = ("on_fit_start", "on_train_start", *EPOCH_HOOKS, *BATCH_HOOKS, "on_save_checkpoint", "on_train_end")
MANUAL = ("manual", "accumulates", "sam", "by hand", "loss.backward")
TRAININGS = ("automatic", *MANUAL, "zero", "sharded", "gathers")
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.2),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.05),
}


@dataclass(frozen=True)
class Action:
    """An action of some ranks in a hook that they have reached ``at`` times before."""

    name: str
    hook: str
    at: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """One ``Trainer.fit``.

    Attributes:
        layout: A name of ``LAYOUTS``.
        scheme: A name of ``programs.SCHEMES``.
        actions: The actions of its hooks.
        training: One of ``TRAININGS``.
        optimizer: A name of ``OPTIMIZERS``.
        wire: Payload type between nodes.
        in_module: Whether the hooks are the module's, instead of a callback's.
    """

    layout: str
    scheme: str
    actions: tuple[Action, ...] = ()
    training: str = "automatic"
    optimizer: str = "sgd"
    wire: str | None = None
    in_module: bool = False

    @property
    def world(self) -> int:
        return sum(LAYOUTS[self.layout])

    @property
    def nodes(self) -> list[tuple[int, ...]]:
        ranks = iter(range(self.world))
        return [tuple(next(ranks) for _ in range(size)) for size in LAYOUTS[self.layout]]

    @property
    def on_all(self) -> bool:
        """Whether all ranks do the same, except for short waits."""
        return all(len(action.ranks) == self.world or action.name == "sleep" for action in self.actions)

    def has(self, *names: str) -> bool:
        return any(action.name in names for action in self.actions)


class Toy(pl.LightningModule):
    """Minimizes the distance to a target of each rank and step.

    Args:
        program: The program.
        rank: Its rank.
        folder: The folder of its files.
        hang_timeout: As in the strategy.
    """

    def __init__(self, program: Program, rank: int, folder: Path = Path(), hang_timeout: float = 0.0) -> None:
        super().__init__()
        self.program, self.rank, self.folder, self.hang_timeout = program, rank, folder, hang_timeout
        self.automatic_optimization = program.training not in MANUAL
        self.weight = nn.Parameter(torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64))
        self.head = nn.Parameter(torch.tensor([0.3, -0.4], dtype=torch.float64))
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))
        self.register_buffer("bank", torch.zeros(0, dtype=torch.float64))
        self.reached: dict[str, int] = {}
        self.steps = 0
        self.peers = [self]
        self.effects: set[str] = set()
        self.stash: Tensor | None = None
        self.state: Any = None
        self.saved: Path | None = None

    def flat(self) -> Tensor:
        return torch.cat([self.weight.detach(), self.head.detach()])

    def loss(self) -> Tensor:
        target = torch.sin(1.3 * torch.arange(3.0).double() + 2.1 * self.rank + 0.7 * self.steps) * self.scale
        target = target + 0.2 * self.rank + (self.extra if "extra" in self._buffers else 0.0)
        pull = (self.weight - self._center()).square().sum() if self.program.training == "gathers" else 0.0
        return 0.5 * ((self.weight - target).square().sum() + (self.head - target[:2]).square().sum() + pull)

    @torch.no_grad()
    def _center(self) -> Tensor:
        """Return the mean of all ranks' weights, by a collective of the program."""
        if dist.is_initialized():
            total = self.weight.detach().clone()
            dist.all_reduce(total)
            return total / dist.get_world_size()
        return torch.stack([peer.weight for peer in self.peers]).mean(0)

    def acts(self, hook: str) -> list[Callable[[Any], object] | None]:
        """Return a function of the trainer for each action, or None for actions that do nothing now."""
        times = self.reached[hook] = self.reached.get(hook, -1) + 1
        does: list[Callable[[Any], object] | None] = []
        for action in self.program.actions:
            kind = ACTIONS[action.name]
            is_now = hook == action.hook and times == action.at
            is_later = kind.also is not None and kind.also(self, action, hook, times - action.at)
            does.append(partial(kind.do, self) if self.rank in action.ranks and (is_now or is_later) else None)
        return does

    def act(self, hook: str, trainer: Any) -> None:
        for do in self.acts(hook):
            if do is not None:
                do(trainer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.effects.clear()
        self.callback.reach("training_step", self.trainer)
        loss = None
        if not self.automatic_optimization:
            self._step_by_hand(self.optimizers())
        elif "none" not in self.effects:
            loss = self.loss()
        self.steps += 1
        return loss

    def _step_by_hand(self, optimizer: Any) -> None:
        optimizer.zero_grad()
        if "none" in self.effects:
            return
        training = self.program.training
        if training == "accumulates":
            with self.trainer.model.no_sync() if dist.is_initialized() else nullcontext():
                self.manual_backward(self.loss() / 4)
            self.manual_backward(self.loss() / 4)
        elif training == "loss.backward":
            self.loss().backward()
        elif "skip" not in self.effects:
            self.manual_backward(self.loss())
        if training == "sam":
            optimizer.first_step()
            optimizer.zero_grad()
            self.manual_backward(self.loss())
            optimizer.second_step()
        elif training == "by hand":
            self.step_without(optimizer)
        else:
            for _ in range(2 if "twice" in self.effects else 1):
                optimizer.step()

    @torch.no_grad()
    def step_without(self, optimizer: Any) -> None:
        """Train by gradients, without a step of the optimizer."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter -= optimizer.param_groups[0]["lr"] * parameter.grad

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.weight.sum())

    def configure_optimizers(self) -> Any:
        make = OPTIMIZERS[self.program.optimizer]
        if self.program.training == "sam":
            return SAM(self.parameters(), make)
        if self.program.training == "zero" and dist.is_initialized():
            return ZeroRedundancyOptimizer(self.parameters(), make.func, **make.keywords)
        if self.program.training == "sharded" and dist.is_initialized():
            return sharded(make)(self.parameters())
        return make(self.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(BATCHES * self.trainer.world_size))  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        return DataLoader(range(self.trainer.world_size))  # type: ignore[arg-type]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, which steps in two halves, as davda54/sam does."""

    def __init__(self, parameters: Any, make: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(parameters, {})
        self.base = make(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self._trained():
            self.state[p]["before"] = p.clone()
            p.add_(0.05 * p.grad / (p.grad.norm() + 1e-12))  # type: ignore[operator]

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._trained():
            p.copy_(self.state[p]["before"])
        self.base.step()

    def _trained(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"] if p.grad is not None)

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError("SAM steps in two halves")


def sharded(make: partial[torch.optim.Optimizer]) -> partial[torch.optim.Optimizer]:
    """Return an optimizer that steps each parameter on one rank and broadcasts it, as distributed Muon does."""

    class Sharded(make.func):  # type: ignore[name-defined, misc]
        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            parameters = [p for group in self.param_groups for p in group["params"]]
            for number, parameter in enumerate(parameters):
                if number % dist.get_world_size() != dist.get_rank():
                    parameter.grad = None
            super().step()
            for number, parameter in enumerate(parameters):
                dist.broadcast(parameter.data, number % dist.get_world_size())
            return loss

    return partial(Sharded, **make.keywords)


# ---- actions ---------------------------------------------------------------------------------------------------------


class OnPurpose(Exception):
    """The exception that a program raises."""


class Score:
    """An object in a callback's state."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Score) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


@torch.no_grad()
def _write(toy: Toy, trainer: Any) -> None:
    toy.weight.copy_(torch.tensor([0.7, 0.6, -0.9]))


@torch.no_grad()
def _swap(toy: Toy, trainer: Any) -> None:
    """Zero the weights, or restore them."""
    if toy.stash is None:
        toy.stash = toy.weight.detach().clone()
        toy.weight.zero_()
    else:
        toy.weight.copy_(toy.stash)
        toy.stash = None


def _puts_back(toy: Toy, action: Action, hook: str, later: int) -> bool:
    return toy.stash is not None and hook == PUT_BACK[action.hook]


@torch.no_grad()
def _put_best_back(toy: Toy, trainer: Any) -> None:
    if toy.stash is not None:
        toy.weight.copy_(toy.stash)


def _keeps_best(toy: Toy, action: Action, hook: str, later: int) -> bool:
    if hook == "on_validation_epoch_end" and toy.stash is None:
        toy.stash = toy.weight.detach().clone()
    return False


@torch.no_grad()
def _clamp(toy: Toy, trainer: Any) -> None:
    for parameter in toy.parameters():
        parameter.clamp_(-0.15, 0.15)


def _change_lr(toy: Toy, trainer: Any) -> None:
    for group in trainer.optimizers[0].param_groups:
        group["lr"] *= 0.3


def _replace_buffer(toy: Toy, trainer: Any) -> None:
    toy.scale = toy.scale * 0.5


def _grow_buffer(toy: Toy, trainer: Any) -> None:
    """Store samples in a memory bank, a different number on each rank."""
    toy.bank = torch.cat([toy.bank, torch.full((toy.rank + 1,), toy.rank + 0.5).double()])


def _add_own_buffer(toy: Toy, trainer: Any) -> None:
    toy.register_buffer("own", torch.full((2,), 7.0, dtype=torch.float64))


def _add_buffer(toy: Toy, trainer: Any) -> None:
    toy.register_buffer("extra", torch.full((3,), 0.25, dtype=torch.float64))


def _freeze_or_unfreeze(toy: Toy, trainer: Any) -> None:
    toy.head.requires_grad_(not toy.head.requires_grad)
    toy.head.grad = None


def _log(toy: Toy, trainer: Any) -> None:
    toy.log("number", float(toy.rank + 1), sync_dist=True)


def _save(toy: Toy, trainer: Any) -> None:
    toy.saved = toy.folder / "saved.ckpt"
    trainer.save_checkpoint(toy.saved)


def _stop(toy: Toy, trainer: Any) -> None:
    trainer.should_stop = True


def _reduce(toy: Toy, trainer: Any) -> None:
    if dist.is_initialized():
        number = torch.tensor([toy.rank + 1.0])
        dist.all_reduce(number)
        expected = sum(range(1, toy.program.world + 1))
        assert not toy.program.on_all or number == expected, f"a sum of {number.item()} instead of {expected}"


def _gather(toy: Toy, trainer: Any) -> None:
    if dist.is_initialized():
        numbers = toy.all_gather(torch.tensor(float(toy.rank)))
        expected = torch.arange(float(toy.program.world))
        assert not toy.program.on_all or torch.equal(numbers, expected), f"gathers {numbers} instead of {expected}"


def _barrier(toy: Toy, trainer: Any) -> None:
    if dist.is_initialized():
        trainer.strategy.barrier()


def _set_state(toy: Toy, trainer: Any) -> None:
    number = 10 + toy.rank
    kinds = [number, numpy.float64(number), torch.tensor(number), Score(number), {"a": [number]}, {number}]
    toy.state = kinds[len(repr(toy.program)) % len(kinds)]


def _raise(toy: Toy, trainer: Any) -> None:
    raise OnPurpose("the dog ate the batch")


def _exit(toy: Toy, trainer: Any) -> None:
    sys.exit(0)


def _sleep(toy: Toy, trainer: Any) -> None:
    time.sleep(0.6 * toy.hang_timeout)


def _sleep_long(toy: Toy, trainer: Any) -> None:
    """Sleep on all ranks in the same place, which is a long step and no hang."""
    time.sleep(1.3 * toy.hang_timeout)


def _loop(toy: Toy, trainer: Any) -> None:
    while dist.is_initialized():
        sum(range(10_000))


def _effect(toy: Toy, trainer: Any, name: str) -> None:
    toy.effects.add(name)


@dataclass(frozen=True)
class Kind:
    """A kind of action.

    Attributes:
        do: A function of a module and its trainer.
        hooks: The hooks in which it can be.
        on: Whether ``"all"`` ranks do it, or only ``"some"``.
        needs: The trainings with which it can be.
        also: Returns whether to repeat it now; ``later`` counts the calls of the hook since the action's moment.
        cause: A regular expression that matches a warning about it.
    """

    do: Callable[[Toy, Any], object]
    hooks: Sequence[str] = HOOKS
    on: Sequence[str] = ("all",)
    needs: Sequence[str] = TRAININGS
    also: Callable[[Toy, Action, str, int], bool] | None = None
    cause: str = "(?!)"


def _goes_on(toy: Toy, action: Action, hook: str, later: int) -> bool:
    return hook == action.hook and later > 0


def _follows(toy: Toy, action: Action, hook: str, later: int) -> bool:
    return hook == action.hook and later == 1


PUT_BACK = {
    "on_validation_start": "on_validation_end",
    "on_validation_epoch_end": "on_validation_end",
    "on_train_epoch_end": "on_train_epoch_start",
    "on_train_batch_end": "on_train_batch_start",
}
_LATER = HOOKS[1:]  # Lightning can save nothing before
_SAVES = [hook for hook in _LATER if hook != "on_save_checkpoint"]
_LOGS = [hook for hook in _LATER if hook not in ("on_validation_end", "on_save_checkpoint", "on_train_end")]
_BETWEEN_STEPS = ("on_train_start", *EPOCH_HOOKS, "on_train_batch_start", "on_train_batch_end")
_EITHER = ("all", "some")
_STEPS = [training for training in TRAININGS if training not in ("sam", "by hand")]
_WRITTEN = r"(?i)wr(ite|ote|itten)|overw|undone|put back"
ACTIONS = {
    "write": Kind(_write, cause=_WRITTEN),
    "swap": Kind(_swap, [*PUT_BACK], also=_puts_back, cause=_WRITTEN),
    "best": Kind(_put_best_back, also=_keeps_best, cause=_WRITTEN),
    "clamp": Kind(_clamp, also=_goes_on, cause=_WRITTEN),
    "lr": Kind(_change_lr),
    "buffer": Kind(_replace_buffer),
    "bank": Kind(_grow_buffer, also=_goes_on),
    "own": Kind(_add_own_buffer, on=("some",)),
    "extra": Kind(_add_buffer),
    "freeze": Kind(_freeze_or_unfreeze, _BETWEEN_STEPS, needs=_STEPS, also=_follows),
    "log": Kind(_log, _LOGS, _EITHER),
    "save": Kind(_save, _SAVES, _EITHER),
    "stop": Kind(_stop, on=_EITHER, cause="should_stop"),
    "reduce": Kind(_reduce, on=_EITHER),
    "gather": Kind(_gather, on=_EITHER),
    "barrier": Kind(_barrier, on=_EITHER),
    "state": Kind(_set_state, needs=_STEPS, cause="Hooks"),
    "raise": Kind(_raise, on=("some",)),
    "exit": Kind(_exit, on=("some",)),
    "sleep": Kind(_sleep, on=_EITHER),
    "long": Kind(_sleep_long),
    "loop": Kind(_loop, on=("some",)),
    "none": Kind(partial(_effect, name="none"), ("training_step",), _EITHER),
    "leave": Kind(partial(_effect, name="leave"), ("on_train_batch_start",), _EITHER),
    "skip": Kind(partial(_effect, name="skip"), ("training_step",), ("some",), ("manual",)),
    "twice": Kind(partial(_effect, name="twice"), ("training_step",), _EITHER, ("manual",)),
}
CAUSES = {
    "sam": "first_step|in halves|optimizer.step",
    "by hand": r"optimizer.step|step\(\)",
    "loss.backward": "manual_backward",
    "zero": "ZeroRedundancyOptimizer",
    "sharded": "Sharded|collective|process group",
    "gathers": "collective|process group",
}
"""Regular expressions that match warnings about a training."""
