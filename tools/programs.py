"""Random programs: ``python -m tools.programs --seconds 3600 --seed 1``, in a checkout.

A program is a ``Trainer.fit`` with one or two actions that real programs contain, each in a hook, at a moment, on all
ranks or on some. Every program must end within ``hang_timeout`` plus 5 s of its last progress, and either

- end normally: all ranks hold the same model to the bit, and have reached the hooks that Lightning reaches on one
  device. With a scheme that keeps the mean of the nodes, the model is also that of one device that averages the losses;
- or end with an error on all ranks, which names the ranks that do what others do not.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests", "tests/support", "tools")]

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from combinations import tell
from ports import free_port
from problems import one_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from zoo import ZOO

from lightning_hiercomm import Health, HierarchicalStrategy, PeriodicAveraging
from lightning_hiercomm._lightning.launcher import settle_as_fork

EPOCHS, BATCHES = 2, 3
HANG_TIMEOUT, PATIENCE, START = 4.0, 5.0, 60.0  # seconds; the last until the first hook
LAYOUTS = {"1x2": [2], "2x1": [1, 1], "2x2": [2, 2], "3x1": [1, 1, 1], "2+1": [2, 1]}
SCHEMES = {name: ZOO[name] for name in ("all_reduce", "periodic")} | {"periodic, epochs": PeriodicAveraging(None)}
SCHEMES |= {name: ZOO[name] for name in ("gossip", "diloco", "daso", "steps_delay")}
KEEP_THE_MEAN = ("all_reduce", "periodic", "periodic, epochs", "gossip")
ONCE = ("on_fit_start", "on_train_start", "on_train_end")
BATCH_HOOKS = ("on_train_batch_start", "training_step", "on_before_optimizer_step", "on_train_batch_end")
VALIDATION_HOOKS = ("on_validation_start", "on_validation_epoch_end", "on_validation_end")
HOOKS = (*ONCE, "on_train_epoch_start", "on_train_epoch_end", *VALIDATION_HOOKS, *BATCH_HOOKS, "on_save_checkpoint")


# ---- what is drawn ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Action:
    """An action of some ranks in a hook that they have reached ``at`` times before."""

    name: str
    hook: str
    at: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """One ``Trainer.fit``; ``layout`` and ``scheme`` are names of ``LAYOUTS`` and ``SCHEMES``."""

    layout: str
    scheme: str
    actions: tuple[Action, ...] = ()
    is_manual: bool = False
    momentum: float = 0.0

    @property
    def world(self) -> int:
        return sum(LAYOUTS[self.layout])

    @property
    def culprits(self) -> set[int]:
        """Ranks that do what others do not."""
        return {rank for action in self.actions if len(action.ranks) < self.world for rank in action.ranks}

    def has(self, *names: str) -> bool:
        return any(action.name in names for action in self.actions)


def drawn(number: int) -> Program:
    """Return the program of a number, always the same."""
    draw = random.Random(number)
    layout, scheme = draw.choice(["1x2", "2x1", "2x1", "2x2", "2x2", "3x1", "2+1"]), draw.choice([*SCHEMES])
    program = Program(layout, scheme, (), draw.random() < 0.5, draw.choice([0.0, 0.9]))
    program = replace(program, actions=tuple(_action(draw, program) for _ in range(draw.choice([1, 1, 2]))))
    return program if goes_together(program) else drawn(number + 1_000_003)


def _action(draw: random.Random, program: Program) -> Action:
    name = draw.choice([*ACTIONS])
    hook = draw.choice([*ACTIONS[name].hooks])
    at = 0 if hook in ONCE else draw.randrange(EPOCHS * BATCHES if hook in BATCH_HOOKS else EPOCHS)
    if draw.choice([*ACTIONS[name].on]) == "all":
        return Action(name, hook, at, tuple(range(program.world)))
    return Action(name, hook, at, (draw.randrange(program.world),))


def goes_together(program: Program) -> bool:
    """Return whether the outcome of a program is defined."""
    if len({action.name for action in program.actions}) < len(program.actions):
        return False
    if program.scheme == "steps_delay" and program.has("write", "freeze"):
        return False  # its servers hold the weights
    return program.is_manual or not program.has("none", "twice")  # Lightning refuses batches without a loss


# ---- the module, and the actions of its hooks ------------------------------------------------------------------------


class Toy(pl.LightningModule):
    """Minimizes the distance to a target of each rank and step; without a rank, the mean distance to all of them."""

    def __init__(self, program: Program, rank: int | None, folder: Path, hang_timeout: float) -> None:
        super().__init__()
        self.program, self.rank, self.folder, self.hang_timeout = program, rank, folder, hang_timeout
        self.automatic_optimization = not program.is_manual
        self.weight = nn.Parameter(torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64))
        self.head = nn.Parameter(torch.tensor([0.3, -0.4], dtype=torch.float64))
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))
        self.steps, self.effects, self.saved = 0, set[str](), list[dict[str, Tensor]]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.effects.clear()
        self.recorder.reach("training_step", self.trainer)
        ranks = torch.tensor([*range(self.program.world)] if self.rank is None else [self.rank]).double()
        places = 1.3 * torch.arange(3.0).double() + 2.1 * ranks[:, None] + 0.7 * self.steps
        target = (torch.sin(places) * self.scale + 0.2 * ranks[:, None]).mean(0)
        loss = 0.5 * ((self.weight - target).square().sum() + (self.head - target[:2]).square().sum())
        self.steps += 1
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if "none" not in self.effects:
            self.manual_backward(loss)
            for _ in range(2 if "twice" in self.effects else 1):
                optimizer.step()
        return None

    def on_train_batch_start(self, *_: object) -> int | None:  # type: ignore[override]
        leaves = "leave" in self.effects
        self.effects.clear()
        return -1 if leaves else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.weight.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.program.momentum)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(BATCHES * self.trainer.world_size))  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        return DataLoader(range(self.trainer.world_size))  # type: ignore[arg-type]


class Recorder(pl.Callback):
    """Records every hook in a file, and runs the actions."""

    def __init__(self, toy: Toy) -> None:
        self.toy, self.reached = toy, dict[str, int]()
        toy.recorder = self  # type: ignore[assignment]

    def reach(self, hook: str, trainer: Any) -> None:
        toy, times = self.toy, self.reached.get(hook, 0)
        self.reached[hook] = times + 1
        with (toy.folder / f"hooks-{toy.rank}").open("a") as hooks:
            hooks.write(f"{hook}\n")
        for action in toy.program.actions:
            if (hook, times) == (action.hook, action.at) and (toy.rank is None or toy.rank in action.ranks):
                ACTIONS[action.name].do(toy, trainer)


for _hook in {*HOOKS} - {"training_step"}:
    setattr(Recorder, _hook, lambda self, trainer, *_, hook=_hook: self.reach(hook, trainer))


@torch.no_grad()
def _write(toy: Toy, trainer: Any) -> None:
    toy.weight.copy_(torch.tensor([0.7, 0.6, -0.9]))


def _freeze(toy: Toy, trainer: Any) -> None:
    toy.head.requires_grad_(False)
    toy.head.grad = None


def _change_lr(toy: Toy, trainer: Any) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] *= 0.3


def _save(toy: Toy, trainer: Any) -> None:
    trainer.save_checkpoint(toy.folder / "saved.ckpt")
    toy.saved.append(torch.load(toy.folder / "saved.ckpt", weights_only=False)["state_dict"])


def _reduce(toy: Toy, trainer: Any) -> None:
    if dist.is_initialized():
        number, expected = torch.tensor([toy.global_rank + 1.0]), sum(range(1, toy.program.world + 1))
        dist.all_reduce(number)
        assert toy.program.culprits or number == expected, f"a sum of {number.item()} instead of {expected}"


def _raise(toy: Toy, trainer: Any) -> None:
    raise ZeroDivisionError("the dog ate the batch")


def _loop(toy: Toy, trainer: Any) -> None:
    while True:
        sum(range(10_000))


@dataclass(frozen=True)
class Kind:
    """A function of a module and its trainer, the hooks in which it can be, and whether on all ranks or on some."""

    do: Callable[[Toy, Any], object]
    hooks: Sequence[str] = HOOKS
    on: Sequence[str] = ("all", "some")


_BETWEEN_STEPS = ("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end")
_SAVES = tuple(hook for hook in HOOKS if hook not in ("on_fit_start", "on_save_checkpoint"))
_LOGS = tuple(hook for hook in _SAVES if hook not in ("on_validation_end", "on_train_end"))
ACTIONS = {
    "write": Kind(_write, _BETWEEN_STEPS, ("all",)),
    "freeze": Kind(_freeze, _BETWEEN_STEPS[1:], ("all",)),
    "lr": Kind(_change_lr, HOOKS[1:], ("all",)),
    "buffer": Kind(lambda toy, _: setattr(toy, "scale", toy.scale * 0.5), _BETWEEN_STEPS, ("all",)),
    "log": Kind(lambda toy, _: toy.log("number", float(toy.global_rank + 1), sync_dist=True), _LOGS),
    "save": Kind(_save, _SAVES),
    "stop": Kind(lambda _, trainer: setattr(trainer, "should_stop", True)),
    "reduce": Kind(_reduce),
    "barrier": Kind(lambda _, trainer: trainer.strategy.barrier()),
    "raise": Kind(_raise, on=("some",)),
    "exit": Kind(lambda *_: sys.exit(0), on=("some",)),
    "sleep": Kind(lambda toy, _: time.sleep(0.6 * toy.hang_timeout)),
    "long": Kind(lambda toy, _: time.sleep(1.3 * toy.hang_timeout), on=("all",)),
    "loop": Kind(_loop, on=("some",)),
    "leave": Kind(lambda toy, _: toy.effects.add("leave"), ("on_train_batch_start",)),
    "none": Kind(lambda toy, _: toy.effects.add("none"), ("training_step",)),
    "twice": Kind(lambda toy, _: toy.effects.add("twice"), ("training_step",)),
}


# ---- ranks -----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How a program ends on one rank: ``"ended"``, ``"error"``, ``"hangs"`` or ``"died"``."""

    how: str
    error: str = ""
    state: dict[str, Tensor] = field(default_factory=dict)
    saved: list[dict[str, Tensor]] = field(default_factory=list)
    number: float = math.nan
    late: float = 0.0
    hooks: list[str] = field(default_factory=list)
    output: str = ""


def outcomes(program: Program, hang_timeout: float, patience: float, is_alone: bool = False) -> list[Outcome]:
    """Run a program on all ranks, or on one device, and return how each rank ends."""
    folder, port, context = Path(tempfile.mkdtemp()), free_port(), multiprocessing.get_context("fork")
    ranks = [None] if is_alone else [*range(program.world)]
    processes = [context.Process(target=_rank, args=(program, rank, folder, port, hang_timeout)) for rank in ranks]
    try:
        for process in processes:
            process.start()
        start, ends = time.time() + START, dict[int, float]()
        while len(ends) < len(processes):
            progress = max((path.stat().st_mtime for path in folder.glob("hooks-*")), default=start)
            for place, process in enumerate(processes):
                if not process.is_alive():
                    ends.setdefault(place, time.time() - progress - hang_timeout)
            if time.time() > progress + hang_timeout + patience:
                break
            time.sleep(0.05)
        found = []
        for place, rank in enumerate(ranks):
            written, exits = folder / f"outcome-{rank}", processes[place].exitcode == 1  # a report, from another thread
            outcome = pickle.loads(written.read_bytes()) if written.exists() else Outcome("error" if exits else "died")
            outcome.how = outcome.how if place in ends else "hangs"
            outcome.late, hooks = ends.get(place, math.inf), folder / f"hooks-{rank}"
            outcome.hooks = hooks.read_text().splitlines() if hooks.exists() else []
            outcome.output = (folder / f"output-{rank}").read_text(errors="replace")
            found.append(outcome)
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(folder)


def _rank(program: Program, rank: int | None, folder: Path, port: int, hang_timeout: float) -> None:
    file = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.disable(logging.NOTSET)
    logging.root.handlers[:] = [logging.StreamHandler(sys.stderr)]
    warnings.simplefilter("always")
    settle_as_fork("fork")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank or 0))
    try:
        outcome = _fit(Toy(program, rank, folder, hang_timeout))
    except BaseException as error:
        traceback.print_exc()
        outcome = Outcome("error", f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}")
    (folder / f"outcome-{rank}").write_bytes(pickle.dumps(outcome))
    os._exit(0)


def _fit(toy: Toy) -> Outcome:
    program, strategy = toy.program, "auto" if toy.rank is None else _strategy(toy)
    devices = 1 if toy.rank is None else program.world
    trainer = one_trainer(toy.folder, devices=devices, strategy=strategy, max_epochs=EPOCHS, callbacks=[Recorder(toy)])
    trainer.fit(toy)
    state = {name: value.detach().clone() for name, value in toy.state_dict().items()}
    return Outcome("ended", "", state, toy.saved, float(trainer.callback_metrics.get("number", math.nan)))


def _strategy(toy: Toy) -> HierarchicalStrategy:
    scheme, sizes = SCHEMES[toy.program.scheme], LAYOUTS[toy.program.layout]
    finds = toy.program.has("freeze")
    health = Health(hang_timeout=toy.hang_timeout)
    return HierarchicalStrategy(scheme, ranks_per_node=sizes, health=health, find_unused_parameters=finds)


# ---- what must hold --------------------------------------------------------------------------------------------------


def check(program: Program, hang_timeout: float = HANG_TIMEOUT, patience: float = PATIENCE) -> None:
    """Run a program, and raise an ``AssertionError`` if its outcome is wrong."""
    ranks = outcomes(program, hang_timeout, patience)
    ends = "\n".join(f"rank {n} {each.how} after {each.hooks[-1:]} {each.error[:300]}" for n, each in enumerate(ranks))
    hows, said = {each.how for each in ranks}, "".join(f"{each.error}\n{each.output}" for each in ranks)
    if program.has("loop") and "hangs" in hows:  # it may be a long task, which a report names
        assert re.search(r"rank \d+ .*\| is busy .*programs\.py:\d+ \(_loop\)", said), f"no rank is named: {ends}"
        return
    assert max(each.late for each in ranks) <= patience, f"a hang: {ends}"
    if hows != {"ended"}:
        named = re.findall(r"\d+", " ".join(re.findall(r"[Rr]anks? ([\d, ]+)", said)))
        assert hows == {"error"}, f"ranks end unequally: {ends}"
        assert program.culprits & {*map(int, named)}, f"an error of all ranks, or one that names no rank: {ends}"
        return
    alike = replace(program, actions=tuple(each for each in program.actions if len(each.ranks) == program.world))
    (alone,) = outcomes(alike, hang_timeout, patience, is_alone=True)
    for each in ranks:
        assert each.hooks == alone.hooks, f"reaches {each.hooks} instead of {alone.hooks}"
        assert all(torch.equal(value, ranks[0].state[name]) for name, value in each.state.items()), "ranks differ"
        assert math.isnan(alone.number) or each.number == (program.world + 1) / 2, f"logs {each.number}"
    for held, expected in [(ranks[0].state, alone.state), *zip(ranks[0].saved, alone.saved, strict=True)]:
        if program.scheme in KEEP_THE_MEAN:
            torch.testing.assert_close(held, expected, rtol=0, atol=1e-9)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.exit(tell(__doc__, "tools.programs", drawn, check, among=10**7))
