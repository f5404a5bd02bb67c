"""Random combinations of what a Trainer is given: ``python -m tools.trainer_combinations``, in a checkout.

As :mod:`combinations`, whose schemes, events and references it shares, but every run is a ``Trainer.fit`` of processes:
accumulation, clipping, precision, validations, checkpoints, callbacks that stop, average and swap, unfreezing, manual
optimization, schedulers, batches of unequal sizes, modules that write to their own weights. What must hold:

- the weights after every step, what a validation sees and what ``fit`` ends on are those of a float64 calculation of
  one process, where numbers are comparable; it gets the samples that each rank saw, and all see each once;
- ranks of a node are equal at all times, all ranks in the end, and the number of steps is what DDP's would be;
- validations, checkpoints and callbacks that write nothing in the end do not change a bit of the training;
- the last file on disk, and one that is saved after ``fit``, hold what ``fit`` ended on;
- a resume from a checkpoint with replicas goes on to the bit, at any step; from a plain one, it runs to the same step;
- the Trainer can be pickled, and validate what it has trained.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests", "tests/support", "tools")]

import combinations
import lightning.pytorch as pl
import torch
from combinations import _NODES, _OPTIMIZERS, _REFERENCES, _SHAPES, Combination, Reference, same, tell
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from problems import one_trainer
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hiercomm import Health, HeterogeneousBatches, HierarchicalStrategy, Transport

_VALIDATED = 6
"""The number of samples in a batch of a validation."""
_NAMES = [*_SHAPES]


@dataclass(frozen=True)
class Fit(Combination):
    """One ``Trainer.fit`` and what follows it; the defaults are the simplest values.

    ``steps`` are those of an optimizer; ``weights`` are how many samples ranks of unequal speed take per batch.
    """

    samples: int = 1  # of a batch of every rank
    shuffle: bool = False  # whether every epoch shuffles them again
    accumulate: int = 1  # batches per step
    short: int = 0  # how many the last step of an epoch lacks
    cut: int = 0  # how many steps ``max_steps`` takes from the last epoch
    precision: str = "32-true"  # the Trainer's
    clip: str | None = None  # gradients, by ``"norm"`` or ``"value"``
    manual: bool = False  # whether the module steps its optimizers itself
    schedule: str | None = None  # when the learning rate falls: after every ``"step"``, or ``"epoch"``
    validate: tuple[str, int] | None = None  # none, or after how many ``"batches"``, or ``"epochs"``
    saves: tuple[str, ...] = ()  # what kinds of ModelCheckpoint there are
    stops: bool = False  # whether there is an EarlyStopping
    # whose callback keeps an average: ``"swa"``, ``"ema"``, or ``"swap"``, which validates it
    averages: str | None = None
    finetuning: bool = False  # whether a BaseFinetuning unfreezes
    module: tuple[str, ...] = ()  # what is unusual about it
    replicas: bool = True  # whether sidecars of checkpoints are written
    after: tuple[str, ...] = ()  # what follows ``fit``

    @property
    def total(self) -> int:
        return self.epochs * self.steps - self.cut

    @property
    def batches(self) -> int:
        """The number of batches of an epoch, on every rank."""
        return self.steps * self.accumulate - self.short

    @property
    def optimizers(self) -> int:
        return 2 if self.two else 1

    def rate_at(self, step: int) -> float:
        return float({None: 1.0, "step": 0.9**step, "epoch": 0.9 ** (step // self.steps)}[self.schedule])

    def knows_last_at(self, step: int) -> bool:
        return not self.manual and step % self.steps == self.steps - 1

    def clipped(self, gradient: Tensor) -> Tensor:
        if self.clip == "value":
            return gradient.clamp(-_CLIP, _CLIP)
        if self.clip == "norm":
            return gradient * min(1.0, _CLIP / (gradient.norm().item() + 1e-6))
        return gradient

    def written(self, values: Tensor) -> Tensor:
        return values.clamp(-_CLAMP, _CLAMP) if "clamp" in self.module else values

    @property
    def plain(self) -> Fit:
        """The same training without validation, checkpoints and callbacks."""
        averages = self.averages if self.averages == "swa" else None
        return replace(self, validate=None, saves=(), stops=False, averages=averages, after=())


_CLIP, _CLAMP = 0.5, 0.6


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def drawn(number: int) -> Fit:
    """Return the fit of a number, always the same."""
    draw = random.Random(number)
    chance = lambda probability: draw.random() < probability  # noqa: E731
    base = combinations.drawn(number)
    epochs, steps = (base.epochs, base.steps) if base.losses else (draw.randint(1, 3), draw.randint(2, 6))
    accumulate = draw.choice([1, 1, 2, 3])
    shared = {each.name: getattr(base, each.name) for each in fields(Combination)}
    fit = Fit(
        **{
            **shared,
            "reweight": None,
            "again": None,
            "clamp": None,
            "looks": (),
            "epochs": epochs,
            "steps": steps,
            "weights": tuple(float(draw.randint(1, 3)) for _ in base.ranks) if base.weights else None,
            "dtype": draw.choice(["float64", "float64", "float64", "float32", base.dtype]),
            "resume": None,
            "knows_last": True,
        },
        samples=draw.randint(1, 2),
        shuffle=chance(0.3),
        accumulate=accumulate,
        short=draw.randrange(accumulate),
        cut=draw.randrange(steps) if chance(0.3) else 0,
        precision=draw.choice(["32-true"] * 4 + ["bf16-mixed", "bf16-true", "scaled"]),
        clip=draw.choice([None, None, None, "norm", "value"]),
        manual=base.two or chance(0.15),
        schedule=draw.choice([None, None, "step", "epoch"]),
        validate=draw.choice([None, ("batches", draw.randint(1, steps * accumulate)), ("epochs", draw.randint(1, 2))]),
        saves=tuple(sorted(draw.sample(["steps", "last", "monitor"], draw.randint(1, 2)))) if chance(0.5) else (),
        stops=chance(0.15),
        averages=draw.choice([None] * 5 + ["swa", "ema", "swap"]),
        module=tuple(sorted(draw.sample(_MODULES, draw.choice([0, 0, 1, 1, 2])))),
        replicas=chance(0.7),
        after=tuple(sorted(draw.sample(_AFTER, draw.choice([0, 1, 3])))),
    )
    total = fit.total
    within = lambda step: None if step is None else step % total  # noqa: E731
    fit = replace(
        fit,
        unfreeze=within(fit.unfreeze) or None,
        freeze=within(fit.freeze) or None,
        resume=draw.randrange(total) if chance(0.4) else None,
        skip=None if fit.skip is None else (fit.skip[0] % total, fit.skip[1]),
    )
    fit = _fitting(fit, draw)
    return fit if goes_together(fit) else drawn(number + 1_000_003)


def _fitting(fit: Fit, draw: random.Random) -> Fit:
    """Return the fit without settings that the Trainer refuses or that have no effect."""
    if fit.manual:
        fit = replace(fit, accumulate=1, short=0, clip=None, schedule=None)
    if fit.raw and fit.wire != "bfloat16":
        fit = replace(fit, raw=False)
    if isinstance(fit.warmup, float) and fit.manual:
        fit = replace(fit, warmup=fit.synchronous_steps)  # the number of steps of such a run is unknown
    if fit.skip is not None:
        fit = replace(fit, precision="scaled")
    if fit.precision == "bf16-true":
        fit = replace(fit, dtype="bfloat16")
    if fit.weights is not None and "batchnorm" in fit.module:  # every rank needs two samples at least
        fit = replace(fit, weights=tuple(max(2.0, weight) for weight in fit.weights))
    if fit.unfreeze is not None and draw.random() < 0.5 and fit.epochs > 1:
        fit = replace(fit, unfreeze=fit.steps, freeze=None, finetuning=True)  # the callback alone says what is trained
    if fit.validate is None:
        fit = replace(fit, stops=False, saves=tuple(kind for kind in fit.saves if kind != "monitor"))
    elif fit.validate[0] == "batches":
        fit = replace(fit, validate=("batches", min(fit.validate[1], fit.batches)))
    return fit


_MODULES = ("teacher", "mask", "tied", "batchnorm", "clamp", "reborn", "noise", "assigns")
_AFTER = ("save", "validate", "pickle")


def goes_together(fit: Fit) -> bool:
    """Return whether no documented rule forbids a fit."""
    if fit.averages == "swa" and fit.resume is not None:
        return False  # a resumed run of Lightning's own strategies, too, keeps the learning rate that SWA would change
    if not combinations.goes_together(fit):
        return False
    if fit.manual and (fit.averages == "swa" or fit.skip):
        return False  # the module's own to do
    if fit.manual and fit.precision == "scaled" and fit.two and (fit.freeze or fit.unfreeze):
        return False  # a scaler refuses to step an optimizer of which all is frozen, in Lightning's own strategies, too
    writes = any(kind in fit.module for kind in ("clamp", "reborn"))
    if fit.scheme == "steps_delay" and writes:
        return False  # pulls overwrite what is written
    if fit.finetuning and (fit.two or (fit.resume is not None and fit.resume + 1 >= fit.steps)):
        return False  # Lightning freezes again after a resume, and does not unfreeze at the epoch that begins with it
    if "noise" in fit.module and fit.resume is not None and fit.validate is not None:
        return False  # Lightning does not repeat a validation that comes after the file, and it draws a number
    if (
        (fit.scheme == "all_reduce" or fit.warmup)
        and fit.wire in ("int8", "int4")
        and fit.unfreeze
        and fit.freeze
        and fit.resume is not None
    ):
        return False  # DDP keeps what was frozen after it was made, and one that a resumed process makes has it not
    if fit.averages == "swa" and (fit.finetuning or fit.freeze or fit.unfreeze or fit.stops or fit.schedule == "step"):
        return False
    if fit.averages == "swa" and "batchnorm" in fit.module:
        return False  # takes an epoch more: tests/compatibility/test_callbacks.py
    averages_in_no_file = fit.averages == "swap" or (fit.averages == "ema" and not fit.replicas)
    return not (fit.stops and fit.resume is not None and averages_in_no_file)


# ---- one rank --------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    """The record of a fit on one rank."""

    trace: list[Tensor] = field(default_factory=list)  # all values after every step
    samples: list[list[int]] = field(default_factory=list)  # of every batch
    # what validations saw: after how many steps, all values, and the loss that was logged
    seen: list[tuple[int, Tensor, float]] = field(default_factory=list)
    end: dict[str, Tensor] = field(default_factory=dict)  # the module after ``fit``
    counted: tuple[int, int] = (0, 0)  # global steps and epochs
    # what files hold, by name: global step and state
    files: dict[str, tuple[int, dict[str, Tensor]]] = field(default_factory=dict)
    loss: float = 0.0  # the last epoch's, of all ranks


def _sample_target(sample: int, name: str) -> Tensor:
    """Return the minimum of a sample's loss."""
    index = torch.arange(math.prod(_SHAPES[name]), dtype=torch.float64) + 10 * _NAMES.index(name)
    return torch.sin(1.3 * index + 2.1 * (sample % 7)) + 0.3 * torch.cos(index + 0.7 * sample)


class Toy(pl.LightningModule):
    """Minimizes the distance to its samples' targets, with features of real modules such as buffers."""

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.fit = fit
        self.record = Record()
        self.saves_to: Path | None = None
        self.steps_before = 0
        self.automatic_optimization = not fit.manual
        for name, shape in _SHAPES.items():
            setattr(self, name, nn.Parameter(torch.full(shape, 0.5, dtype=fit.dtype_of(name))))
        if "tied" in fit.module:
            self.again = nn.ParameterList([self.c])
        if "teacher" in fit.module:
            self.teacher = nn.Parameter(torch.zeros(4), requires_grad=False)
        if "mask" in fit.module or fit.buffer == "mask":
            self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        if "batchnorm" in fit.module:
            self.norm = nn.BatchNorm1d(2, affine=False)
        if fit.buffer == "statistics":
            self.register_buffer("statistics", torch.ones(3))
        if "assigns" in fit.module:
            self.register_buffer("statistics_before", torch.ones(3))
            self.register_buffer("statistics_of_now", torch.ones(3))
        for name in fit.frozen_at(0) if not fit.finetuning else ():
            getattr(self, name).requires_grad_(False)

    def flat(self) -> Tensor:
        return torch.cat([getattr(self, name).detach().flatten().double() for name in _SHAPES]).cpu()

    def loss(self, samples: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for name in _NAMES:
            parameter = getattr(self, name)
            targets = torch.stack([_sample_target(int(sample), name) for sample in samples])
            total = total + 0.5 * (parameter.flatten() - targets.to(parameter)).square().sum(1).mean()
        return total

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self.trainer.current_epoch * self.fit.steps + self.trainer.fit_loop.batch_idx // self.fit.accumulate

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        fit = self.fit
        if fit.resume is not None:  # a plain loader restarts in mid-epoch, with any strategy
            at = (self.trainer.current_epoch * fit.batches + batch_idx) * self.trainer.world_size + self.global_rank
            batch = torch.arange(len(batch)) + 5 * at
        self.record.samples.append(batch.tolist())
        if fit.manual:
            optimizers = self.optimizers() if fit.two else [self.optimizers()]
            for optimizer in optimizers:  # type: ignore[union-attr]
                optimizer.zero_grad()
            loss = self._disturbed(batch)
            self.manual_backward(loss)
            for optimizer in optimizers:  # type: ignore[union-attr]
                optimizer.step()
            return loss
        return self._disturbed(batch)

    def _disturbed(self, batch: Tensor) -> Tensor:
        fit, rank = self.fit, self.global_rank
        loss = self.loss(batch)
        if "batchnorm" in fit.module:
            features = batch.to(self.norm.running_mean).unsqueeze(1).repeat(2, 2)
            loss = loss + 0.0 * self.norm(features).sum()
        if fit.buffer == "statistics":
            self.statistics.mul_(0.9).add_(0.1 * rank)
        if "assigns" in fit.module:
            self.statistics_before = self.statistics_of_now
            self.statistics_of_now = 0.9 * self.statistics_of_now + 0.1 * rank
        if "noise" in fit.module:
            loss = loss * (0.5 + torch.rand(()))
        if (self.step, self.trainer.strategy.topology.node) == fit.skip:
            loss = loss * math.inf
        if fit.losses:
            loss = loss - loss.detach() + fit.loss(rank, min(self.trainer.current_epoch, fit.epochs - 1))
        self.log("train_loss", loss.detach().float(), on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_start(self) -> None:
        self.steps_before = self.trainer.global_step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        fit = self.fit
        if not fit.finetuning and batch_idx % fit.accumulate == 0 and (fit.unfreeze or fit.freeze):
            frozen = fit.frozen_at(self.step)
            for name in _NAMES:
                parameter = getattr(self, name)
                if parameter.requires_grad == (name in frozen):
                    parameter.requires_grad_(name not in frozen)
                    parameter.grad = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        fit = self.fit
        if self.trainer.global_step == self.steps_before:
            return  # it accumulates; and StochasticWeightAveraging ends with an epoch that only collects statistics
        self.steps_before = self.trainer.global_step
        with torch.no_grad():
            if "clamp" in fit.module:
                for name in _NAMES:
                    getattr(self, name).clamp_(-_CLAMP, _CLAMP)
            if "teacher" in fit.module:
                self.teacher.data = 0.5 * (self.teacher.data + self.c.data.to(self.teacher))
            if "reborn" in fit.module and len(self.record.trace) == 2:
                self.c.fill_(0.1)
        self.record.trace.append(self.flat())
        if self.saves_to is not None and len(self.record.trace) - 1 == fit.resume:
            self.trainer.save_checkpoint(self.saves_to)  # callbacks save before this hook writes

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0 and self._is_fitting:
            self.record.seen.append((len(self.record.trace), self.flat(), math.nan))
        self.log("val_loss", self.loss(batch).detach(), sync_dist=True, batch_size=len(batch))

    @property
    def _is_fitting(self) -> bool:
        return self.trainer.state.fn == "fit" and not self.trainer.sanity_checking

    def on_validation_end(self) -> None:
        if self._is_fitting:
            steps, values, _ = self.record.seen[-1]
            self.record.seen[-1] = steps, values, float(self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self) -> Any:
        make = _OPTIMIZERS[self.fit.optimizer]
        if self.fit.two:
            return [make([getattr(self, name) for name in half]) for half in combinations.HALVES]
        names = [name for name in _NAMES if not (self.fit.finetuning and name in self.fit.frozen_at(0))]
        optimizer = make([getattr(self, name) for name in names])
        if self.fit.schedule is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": self.fit.schedule}]

    def train_dataloader(self) -> DataLoader:
        fit, ranks = self.fit, self.trainer.world_size
        per_batch = sum(map(int, fit.weights)) if fit.weights else fit.samples * ranks
        size = per_batch if fit.weights else fit.samples
        return DataLoader(range(per_batch * fit.batches), batch_size=size, shuffle=fit.shuffle)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader:
        return DataLoader(range(_VALIDATED * self.trainer.world_size), batch_size=3)  # type: ignore[arg-type]


class _Unfreezes(BaseFinetuning):
    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module: Any) -> None:
        pl_module.b.requires_grad_(False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == self.epoch:
            pl_module.b.requires_grad_(True)
            optimizer.add_param_group({**optimizer.param_groups[0], "params": [pl_module.b]})


class _Swaps(pl.Callback):
    """Averages the weights as most programs do."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.trained: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        for name, value in pl_module.named_parameters():
            self.average[name] = self.average.get(name, value.detach()).lerp(value.detach(), 0.1)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.trained = {name: value.detach().clone() for name, value in pl_module.named_parameters()}
        for name, value in pl_module.named_parameters():
            value.data.copy_(self.average.get(name, value))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, value in pl_module.named_parameters():
            value.data.copy_(self.trained[name])


def trained(fit: Fit, folder: Path, accelerator: str, resume: bool = False, saves: bool = False) -> Record:
    """Fit it on this rank, and do what comes after.

    It ``saves`` a file in the folder, the same on all ranks, if it is to be resumed later; ``resume`` goes on from it.
    """
    module, file = Toy(fit), folder / "saved.ckpt"
    torch.manual_seed(0)
    module.saves_to = file if saves else None
    arguments: dict[str, Any] = {"precision": fit.precision}
    if fit.precision == "scaled":
        # of two optimizers, the second one's gradients were scaled before the first one's step let the scale grow
        device = "cuda" if accelerator == "gpu" else "cpu"
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=1000 if fit.two else 3)
        arguments = {"plugins": [MixedPrecision("16-mixed", device, scaler)]}
    if fit.clip:
        arguments |= {"gradient_clip_val": _CLIP, "gradient_clip_algorithm": fit.clip}
    if fit.validate is None:
        arguments["limit_val_batches"] = 0
    elif fit.validate[0] == "batches":
        arguments["val_check_interval"] = fit.validate[1]
    else:
        arguments["check_val_every_n_epoch"] = fit.validate[1]
    trainer = one_trainer(
        folder,
        accelerator=accelerator,
        devices=1 if accelerator == "gpu" else len(fit.ranks),
        num_nodes=len(fit.ranks) if accelerator == "gpu" else 1,
        strategy=_strategy(fit, accelerator),
        max_epochs=fit.epochs,
        max_steps=fit.total * fit.optimizers if fit.cut else -1,
        accumulate_grad_batches=fit.accumulate,
        callbacks=[*_callbacks(fit, folder)],
        enable_checkpointing=bool(fit.saves),
        num_sanity_val_steps=2 if "validate" in fit.after else 0,
        **arguments,
    )
    trainer.fit(module, ckpt_path=file if resume else None)
    record = module.record
    record.end = {name: value.detach().to("cpu", copy=True) for name, value in module.state_dict().items()}
    record.counted = trainer.global_step, trainer.current_epoch
    record.loss = float(trainer.callback_metrics["train_loss"])
    if not resume:
        _afterwards(fit, folder, trainer, module)
    return record


def _strategy(fit: Fit, accelerator: str) -> HierarchicalStrategy:
    weights = fit.weights
    batches = HeterogeneousBatches(int(sum(weights)), speeds=list(weights)) if weights else None
    return HierarchicalStrategy(
        fit.make(),
        batches=batches,
        process_group_backend="gloo" if accelerator == "gpu" else None,  # nccl refuses two ranks on one GPU
        ranks_per_node=[len(node) for node in _NODES[fit.nodes]],
        wire_dtype="raw_bfloat16" if fit.raw else fit.wire,  # type: ignore[arg-type]
        transport=Transport(bucket_mb=fit.bucket_bytes / 2**20),
        average_optimizer_state=fit.state,
        health=Health(hang_timeout=100.0),
        checkpoint_replicas=fit.replicas,
        find_unused_parameters=fit.freeze is not None,
    )


def _callbacks(fit: Fit, folder: Path) -> Iterator[pl.Callback]:
    if fit.finetuning and fit.unfreeze is not None:
        yield _Unfreezes(fit.unfreeze // fit.steps)
    if fit.stops:
        yield EarlyStopping("val_loss", patience=0, min_delta=0.05, check_on_train_epoch_end=False)
    if fit.averages == "swa":
        yield StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
    elif fit.averages == "ema":
        yield EMAWeightAveraging(decay=0.5)
    elif fit.averages == "swap":
        yield _Swaps()
    if "steps" in fit.saves:
        newest: dict[str, Any] = {"monitor": "step", "mode": "max", "save_top_k": 2}
        yield ModelCheckpoint(folder / "steps", "{step}", every_n_train_steps=2 * fit.optimizers, **newest)
    if "last" in fit.saves:
        yield ModelCheckpoint(folder / "last", save_last=True, save_on_train_epoch_end=True)
    if "default" in fit.saves:
        yield ModelCheckpoint(folder / "default")
    if "monitor" in fit.saves:
        yield ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=1)


def _afterwards(fit: Fit, folder: Path, trainer: pl.Trainer, module: Toy) -> None:
    if "save" in fit.after:
        trainer.save_checkpoint(folder / "after" / "after.ckpt")
    if "pickle" in fit.after:
        pickle.dumps(trainer.strategy)
    if "validate" in fit.after:
        trainer.validate(module, verbose=False)
        trainer.save_checkpoint(folder / "after" / "validated.ckpt")
    trainer.strategy.barrier()
    for path in sorted(folder.glob("*/*.ckpt")):
        saved = torch.load(path, weights_only=False, map_location="cpu")
        module.record.files[f"{path.parent.name}/{path.name}"] = saved["global_step"], saved["state_dict"]


def program(fit: Fit, folder: Path, accelerator: str = "cpu") -> dict[str, Record]:
    """Run all fits of a combination on one rank; return their records by name."""
    torch.set_num_threads(1)
    if accelerator == "gpu":  # Lightning gives ranks of a machine devices of their own, so each is alone on one
        rank, ranks = os.environ["LOCAL_RANK"], str(len(fit.ranks))
        os.environ.update(TORCHELASTIC_RUN_ID="gpu", WORLD_SIZE=ranks, LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ.update(RANK=rank, GROUP_RANK=rank, NODE_RANK=rank)
    record = {"whole": trained(fit, folder / "whole", accelerator, saves=True)}
    if (fit.plain != fit or fit.resume is not None) and "noise" not in fit.module:
        record["plain"] = trained(fit.plain, folder / "plain", accelerator)
    if (folder / "whole" / "saved.ckpt").exists() and len(record["whole"].trace) > (fit.resume or 0) + 1:
        record["resumed"] = trained(fit, folder / "whole", accelerator, resume=True)
    return record


# ---- what must hold --------------------------------------------------------------------------------------------------

ranks = Ranks()
_accelerator = "cpu"


@contextmanager
def on_a_gpu() -> Iterator[None]:
    global _accelerator, ranks
    multiprocessing.set_forkserver_preload(["ranks", "lightning.pytorch", "lightning_hiercomm"])
    before, ranks, _accelerator = ranks, Ranks(of="forkserver"), "gpu"
    try:
        yield
    finally:
        ranks.close()
        ranks, _accelerator = before, "cpu"


def check(fit: Fit) -> None:
    """Run a combination on pooled processes, and check its results.

    Raises:
        AssertionError: If it is not.
        RankError: If it ends in an error.
    """
    if _accelerator == "gpu" and fit.precision == "scaled" and torch.bfloat16 in map(fit.dtype_of, _SHAPES):
        return  # torch's scaler knows no such gradients there
    folder = Path(tempfile.mkdtemp())
    try:
        record = ranks.run(len(fit.ranks), program, fit, folder, _accelerator)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    whole = [rank["whole"] for rank in record]
    _check_whole(fit, whole)
    if "plain" in record[0]:
        for rank, each in enumerate(record):
            same(each["whole"].trace, each["plain"].trace, f"looks changed the run: rank {rank}", strict=False)
    if "resumed" in record[0]:
        _check_resumed(fit, record)
    tolerance = _tolerance(fit)
    if tolerance is not None:
        _compare(fit, whole, tolerance)


def _check_whole(fit: Fit, ranks: list[Record]) -> None:
    first = ranks[0]
    if not fit.stops:
        assert len(first.trace) == fit.total, f"{len(first.trace)} steps instead of {fit.total}"
        assert first.counted[0] == fit.total * fit.optimizers, first.counted
        assert fit.cut or first.counted[1] == fit.epochs, first.counted
    for node in _NODES[fit.nodes]:
        for rank in node[1:]:
            same(ranks[rank].trace, ranks[node[0]].trace, f"ranks {node[0]} and {rank} of a node differ")
    for rank, own in enumerate(ranks):
        assert own.loss == first.loss or math.isnan(first.loss), f"rank {rank} logs {own.loss}, rank 0 {first.loss}"
        assert own.counted == first.counted, f"rank {rank} counts {own.counted}, rank 0 {first.counted}"
        _check_state(_known(fit, own.end), _known(fit, first.end), f"after fit rank {rank} differs from rank 0")
        assert len(own.seen) == len(first.seen)
        if fit.averages not in ("swap", "ema"):
            for (step, values, _), (_, other, _) in zip(own.seen, first.seen, strict=True):
                assert torch.equal(values, other), f"rank {rank} validates other weights than rank 0 after step {step}"
        for (step, _, loss), (_, _, other_loss) in zip(own.seen, first.seen, strict=True):
            is_same = loss == other_loss or math.isnan(loss)
            assert is_same, f"rank {rank} logs {loss} after step {step}, rank 0 {other_loss}"
    if fit.averages not in ("swap", "ema"):
        for step, values, loss in first.seen:
            expected = _validation_loss(values, len(ranks))
            is_narrow = any(fit.dtype_of(name) == torch.bfloat16 for name in _NAMES)
            tolerance = 2e-2 if is_narrow else 1e-4
            assert math.isclose(loss, expected, rel_tol=tolerance), (
                f"after step {step} {loss} is logged, not {expected}"
            )
    _check_samples(fit, ranks)
    _check_files(fit, first)


def _validation_loss(values: Tensor, ranks: int) -> float:
    """Return the mean loss over the samples that all ranks validate."""
    samples = range(_VALIDATED * ranks)
    targets = torch.stack([torch.cat([_sample_target(sample, name) for name in _NAMES]) for sample in samples])
    return float(0.5 * (values - targets).square().sum(1).mean())


def _known(fit: Fit, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that must be equal on all ranks: after the last forward pass buffers of DDP differ."""
    if fit.scheme != "all_reduce" and len(_NODES[fit.nodes]) > 1:
        return state
    return {name: value for name, value in state.items() if not name.startswith(("statistics", "norm"))}


def _check_samples(fit: Fit, ranks: list[Record]) -> None:
    """Check that in every epoch all ranks together see every sample once."""
    if fit.resume is not None:
        return
    whole_epochs = len(ranks[0].samples) // fit.batches
    for epoch in range(whole_epochs):
        here = slice(epoch * fit.batches, (epoch + 1) * fit.batches)
        seen = [sample for record in ranks for batch in record.samples[here] for sample in batch]
        assert sorted(seen) == list(range(len(seen))), f"in epoch {epoch} ranks see {sorted(seen)}"


def _check_files(fit: Fit, record: Record) -> None:
    steps = record.counted[0]
    for name, (step, state) in record.files.items():
        kind = name.partition("/")[0]
        is_last = name == "last/last.ckpt" or kind in ("after", "default") or (kind == "steps" and step == steps)
        if not is_last or (fit.averages == "swa" and kind != "after"):
            continue
        writes = any(writer in fit.module for writer in ("clamp", "teacher", "reborn"))
        if kind == "steps" and (fit.averages == "ema" or fit.wire is not None or writes):
            continue  # callbacks save before the module writes, and before an epoch's end
        assert step == steps, f"{name} is of step {step} instead of {steps}"
        if fit.averages == "ema":  # both are means of the nodes' averages, summed in another order
            for key, value in state.items():
                end = record.end[key]  # an average was made before the precision plugin made the module narrow
                tolerance = 1e-6 if value.dtype == end.dtype else 1e-2
                combinations.is_close(value.double(), end.double(), tolerance, f"{name} holds {key}")
            continue
        _check_state(state, record.end, f"{name} holds something else than the module after fit")
    if "save" in fit.after:
        assert "after/after.ckpt" in record.files
    if "last" in fit.saves:
        assert "last/last.ckpt" in record.files, [*record.files]


def _check_resumed(fit: Fit, record: list[dict[str, Record]]) -> None:
    assert fit.resume is not None
    for rank, each in enumerate(record):
        whole, resumed = each["whole"], each["resumed"]
        assert resumed.counted == whole.counted or fit.stops, f"a resumed run counts {resumed.counted}, {whole.counted}"
        if not fit.replicas and fit.scheme == "all_reduce" and not fit.module and fit.averages is None and not fit.wire:
            same(whole.trace[fit.resume + 1 :], resumed.trace, "a resume of DDP's training goes another way", False)
        if not fit.replicas:
            first = record[0]["resumed"]
            _check_state(_known(fit, resumed.end), _known(fit, first.end), f"resumed rank {rank} differs from rank 0")
            continue
        if "reborn" in fit.module:
            continue  # it counts its own steps
        after = whole.trace[fit.resume + 1 :]
        same(after, resumed.trace, f"a resume after step {fit.resume}: rank {rank}", strict=False)
        message = f"after a resume after step {fit.resume} rank {rank} ends differently"
        _check_state(_known(fit, whole.end), _known(fit, resumed.end), message)
        if fit.averages == "swap":
            continue  # the callback's average is in no file
        later = [(step, values) for step, values, _ in whole.seen if step > fit.resume + 1]
        again = [(step + fit.resume + 1, values) for step, values, _ in resumed.seen if step > 0]
        assert [step for step, _ in later] == [step for step, _ in again], f"validations {later} and {again}"
        for (step, one), (_, other) in zip(later, again, strict=True):
            assert torch.equal(one, other), f"after a resume the validation after step {step} sees other weights"


def _tolerance(fit: Fit) -> float | None:
    """Return the tolerance between a run and its reference; None if they cannot be compared."""
    if fit.precision == "bf16-true" or any(kind in fit.module for kind in ("noise", "reborn")):
        return None
    if fit.averages == "swa":
        return None
    if fit.freeze is not None and (fit.accumulate > 1 or fit.manual):
        return None  # nodes synchronize when the optimizer steps, with gradients that were taken before
    if fit.finetuning and fit.argument("fragments", 1) != 1:
        return None  # what unfreezes is the optimizer's last, and elsewhere in the parts
    return combinations.tolerance_of(fit)


def _compare(fit: Fit, ranks: list[Record], tolerance: float) -> None:
    steps = len(ranks[0].trace)
    seen = tuple(step - 1 for step, _, _ in ranks[0].seen if step)
    c = replace(fit, looks=seen)

    def gradient(rank: int, step: int, names: Sequence[str], x: Tensor) -> Tensor:
        epoch, in_epoch = divmod(step, fit.steps)
        begin = epoch * fit.batches + in_epoch * fit.accumulate
        end = min(begin + fit.accumulate, (epoch + 1) * fit.batches)
        total = torch.zeros_like(x)
        for batch in ranks[rank].samples[begin:end]:
            means = [torch.stack([_sample_target(s, name) for s in batch]).mean(0) for name in names]
            total += x - torch.cat(means)
        return total / fit.accumulate

    column = 0
    for shapes in combinations.halves_of(c):
        reference = _REFERENCES[c.scheme](c, shapes, gradient)
        reference.stop_after = steps
        numel = sum(math.prod(shape) for shape in shapes.values())
        here = slice(column, column + numel)
        column += numel
        _compare_half(fit, ranks, reference.run(), here, tolerance)


def _compare_half(fit: Fit, ranks: list[Record], reference: Reference, here: slice, tolerance: float) -> None:
    # where max_steps cuts an epoch, it ends after the last step's hooks
    for step in range(len(ranks[0].trace) - bool(fit.cut)):
        for rank, record in enumerate(ranks):
            expected = reference.trace[step][rank]
            combinations.is_close(record.trace[step][here], expected, tolerance, f"after step {step} rank {rank} holds")
    if fit.averages is None:
        for step, values, _ in ranks[0].seen:
            if step:
                seen = reference.looks[step - 1]
                combinations.is_close(values[here], seen, tolerance, f"validation after {step} sees")
    if fit.averages != "ema":
        end = torch.cat([ranks[0].end[name].flatten().double() for name in _SHAPES])
        combinations.is_close(end[here], reference.end, tolerance, "fit ends on")


def _check_state(one: dict[str, Tensor], other: dict[str, Tensor], message: str) -> None:
    assert one.keys() == other.keys(), f"{message}: {one.keys() ^ other.keys()}"
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"{message}: {name} is {value.tolist()} and {other[name].tolist()}"


if __name__ == "__main__":
    import warnings

    warnings.filterwarnings("ignore")
    from trainer_combinations import check, drawn, on_a_gpu  # ranks find programs by this name

    places = {"cpu": nullcontext, "gpu": on_a_gpu}
    sys.exit(tell(__doc__, "tools.trainer_combinations", drawn, check, places=places))
