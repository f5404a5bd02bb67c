"""Nodes that synchronize by the clock: they end an epoch at the same exchange, after unequal numbers of batches."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging, Timer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_hiercomm._lightning.trainer import (
    adds_distributed_sampler,
    advance_schedulers,
    call_after_batches,
    call_nothing_after_batches,
    can_stop_early,
    end_epoch_after_batch,
    hold_schedulers,
    leave_train_dataloaders_alone,
    parts_of_loader,
    prepare_train_dataloaders_again,
    put_callback_first,
    release_schedulers,
    restart_train_dataloaders,
    set_global_step,
    wrap_train_dataloaders,
)
from lightning_hiercomm.batches.claims import ClaimedBatchSampler, Claims, claimed_dataloader, is_divided
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import EverySeconds, ParameterSync, RunningParameterSync
from lightning_hiercomm.schemes.pace import Pace
from lightning_hiercomm.trainer.options import UnequalData
from lightning_hiercomm.trainer.unequal_data import UnequalDataHooks, UnequalNodes
from lightning_hiercomm.trainer.watch import RunControl

log = logging.getLogger(__name__)


class PacedLoader(CombinedLoader):
    """Yields this node's batches and has no length, so that Lightning loads one batch ahead and finds the last one.

    Ranks of a node take as many batches as the one that has fewest.

    Args:
        loader: The train dataloaders.
        mode: How several are combined.
        topology: The nodes.
        device: The device of the ranks' tensors.
        is_claimed: Returns whether ranks of a node have equally many batches, because they claim them together.
    """

    def __init__(
        self,
        loader: object,
        mode: Literal["min_size", "max_size_cycle", "max_size", "sequential"],
        topology: Topology,
        device: torch.device,
        is_claimed: Callable[[], bool],
    ) -> None:
        super().__init__(loader, mode)
        self._is_claimed = is_claimed
        self._topology = topology
        self._device = device
        self._yielded = 0
        self._has_warned = False

    @override
    def __len__(self) -> int:
        raise TypeError("nodes take unequal numbers of batches")

    @override
    def __iter__(self) -> PacedLoader:
        super().__iter__()
        self._yielded = 0
        return self

    @override
    def __next__(self) -> Any:
        has_batch = self._yielded < min(self.limits or [math.inf])
        batch: Any = None
        try:
            batch = super().__next__() if has_batch else None
        except StopIteration:
            has_batch = False
        if not self._all_in_node(has_batch):
            raise StopIteration
        self._yielded += 1
        return batch

    def _all_in_node(self, has_batch: bool) -> bool:
        if self._topology.ranks_on_node == 1 or self._is_claimed():
            return has_batch
        lacks = torch.tensor([int(not has_batch)], device=self._device)
        self._topology.intra.all_reduce(lacks, op="max").wait()
        if has_batch and lacks.item() and not self._has_warned:
            self._has_warned = True
            log.warning(
                "rank %d (node %d) has more batches than another rank of its node. Ranks of a node take equally many"
                " steps, so its last batches stay unused",
                self._topology.rank,
                self._topology.node,
            )
        return not lacks.item()


class PacedNodes(UnequalNodes):
    """Lets nodes take unequal numbers of batches between exchanges, and end each epoch at the same exchange.

    Attributes:
        is_within_epoch: Whether nodes are at different batches of an epoch, so that they cannot save together.
    """

    _claims: Claims | None = None
    _sampler: ClaimedBatchSampler | None = None
    _claimed_in: int | None = None  # the epoch
    _pace: Pace | None = None
    is_within_epoch = False

    @override
    def attach(self, trainer: pl.Trainer) -> None:
        """Let nodes take unequal numbers of batches in the epochs of a trainer. Collective."""
        check_trainer(trainer)
        put_callback_first(trainer, self)
        if adds_distributed_sampler(trainer):
            leave_train_dataloaders_alone(trainer)
        wrap_train_dataloaders(
            trainer,
            lambda given: PacedLoader(
                *parts_of_loader(given), self._topology, self._device, lambda: self._sampler is not None
            ),
        )

    @override
    def detach(self, trainer: pl.Trainer) -> None:
        super().detach(trainer)
        prepare_train_dataloaders_again(trainer)
        call_nothing_after_batches(trainer)
        release_schedulers(trainer)

    def process_dataloader(self, loader: Any, trainer: pl.Trainer, address: str) -> Any:
        """Return a train dataloader, whose batches nodes claim if Lightning would divide its data. Collective."""
        if not adds_distributed_sampler(trainer) or not is_divided(loader):
            return loader
        if self._claimed_in == trainer.current_epoch:
            raise ValueError(
                "EverySeconds: nodes claim the batches of one train dataloader, and there are several: set"
                " Trainer(use_distributed_sampler=False) and give each node its own data"
            )
        if self._claims is None:
            self._claims = Claims(self._topology, address)
        seeds = self._topology.world.all_gather_object(int(os.environ.get("PL_GLOBAL_SEED", 0)))
        self._claimed_in = trainer.current_epoch
        claimed = claimed_dataloader(loader, self._claims, self._topology, seeds[0])
        assert isinstance(claimed.batch_sampler, ClaimedBatchSampler)
        self._sampler = claimed.batch_sampler
        self._sampler.go_to(trainer.current_epoch)
        return claimed

    def begin(self, trainer: pl.Trainer, run: TrainingRun, control: RunControl) -> None:
        """Follow a run that is about to train."""
        if len(run.schemes) != 1:
            raise ValueError(
                f"EverySeconds: nodes synchronize after the steps of one optimizer, and configure_optimizers returned"
                f" {len(run.schemes)}: return one, or set sync_every to a number"
            )
        (running,) = run.schemes
        assert isinstance(running, RunningParameterSync)
        assert running.pace is not None
        pace, self._run, self._control = running.pace, run, control
        self._pace = pace
        self._seen = pace.exchanges
        self._is_over = False
        self._first_step = self._scheduled = 0
        hold_schedulers(trainer)
        pace.asks_to_stop = lambda: trainer.should_stop
        self._after_exchange = control.watch_exchanges(trainer, lambda: pace.exchanges)

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Begin training, perhaps from a checkpoint.

        Raises:
            ValueError: If it was saved within an epoch.
        """
        if trainer.fit_loop.restarted_mid_epoch and not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            raise ValueError(
                "EverySeconds: the checkpoint was saved within an epoch, and which batches nodes had used is not known:"
                " resume from one that was saved at the end of an epoch"
            )
        self._first_step = self._scheduled = trainer.global_step
        if self._sampler is not None and self._sampler.go_to(trainer.current_epoch):
            with isolate_rng():
                restart_train_dataloaders(trainer)

    # ---- a batch -------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._pace is not None
        self._measure(batch)
        self.batches += 1
        self._pace.has_data = not trainer.is_last_batch
        self._is_over, self.is_within_epoch = False, True

    def end_batch(self, trainer: pl.Trainer) -> None:
        """End a batch. After this node's last one, take part in exchanges until all nodes are done. Collective then."""
        self._follow_exchange(trainer)
        while not self._is_over and self._is_done(trainer):
            self._run.take_part()
            self._follow_exchange(trainer)
        if self._is_over:
            self.is_within_epoch = False
            end_epoch_after_batch(trainer)

    def _is_done(self, trainer: pl.Trainer) -> bool:
        """Return whether this node takes no further step in this epoch unless others have taken fewer."""
        return (
            trainer.is_last_batch
            or _has_reached_max_steps(trainer)
            or (trainer.should_stop and can_stop_early(trainer))
        )

    def _follow_exchange(self, trainer: pl.Trainer) -> None:
        """Draw the consequences of an exchange, which are equal on all ranks."""
        pace = self._pace
        assert pace is not None
        if pace.exchanges == self._seen:
            return
        self._seen = pace.exchanges
        set_global_step(trainer, self._first_step + pace.mean_steps)
        self._schedule(trainer)
        is_stopped = pace.is_asked_to_stop and can_stop_early(trainer)
        self._is_over = not pace.any_has_data or is_stopped or _has_reached_max_steps(trainer)
        if is_stopped:
            trainer.should_stop = True
        if self._is_over or self._is_done(trainer):  # no batch follows at once
            self._after_exchange()

    def _schedule(self, trainer: pl.Trainer) -> None:
        """Let learning-rate schedulers follow the mean of the nodes' steps, so that they are equal on all nodes."""
        step = trainer.global_step if trainer.max_steps < 0 else min(trainer.global_step, trainer.max_steps)
        advance_schedulers(trainer, self._scheduled, step)
        self._scheduled = step

    def lines(self) -> list[str]:
        """Return a table of the nodes, for the monitor."""
        return [] if self._pace is None else self._pace.lines()

    def check_epoch_end(self) -> None:
        """Raise an error if this node ends an epoch that others continue."""
        if not self._is_over:
            raise RuntimeError(
                f"EverySeconds: rank {self._topology.rank} (node {self._topology.node}) ends an epoch without a last"
                " batch: its dataloader has no batch, or on_train_batch_start returned -1. Give each node at least one"
                " batch, and end a run by trainer.should_stop = True"
            )

    def check_save(self) -> None:
        """Raise an error if nodes are at different batches, so that they cannot save together."""
        if self.is_within_epoch and not self._control.stops_together:
            raise ValueError(
                "EverySeconds: a checkpoint within an epoch cannot be saved, because nodes are at different batches:"
                " save in on_train_epoch_end or on_validation_end"
            )


class OwnPaceHooks(UnequalDataHooks):
    """The hooks of a strategy whose nodes may synchronize by the clock."""

    @property
    def _paced(self) -> PacedNodes | None:
        return self._unequal if isinstance(self._unequal, PacedNodes) else None

    @override
    def _new_nodes(self, options: UnequalData) -> UnequalNodes:
        is_paced = self._settings.by_clock and self._topology.num_nodes > 1
        if is_paced:
            self._check_timeout()
        kind = PacedNodes if is_paced else UnequalNodes
        return kind(options, self.scheme, self._topology, self.root_device)

    def _check_timeout(self) -> None:
        schedule = self.scheme.schedule if isinstance(self.scheme, ParameterSync) else None
        timeout = (self._timeout or default_pg_timeout).total_seconds()
        if isinstance(schedule, EverySeconds) and schedule.seconds >= timeout:
            raise ValueError(
                f"{schedule!r}: a node without batches waits in an exchange for longer than timeout={timeout:g} s:"
                " synchronize more often, or set HierarchicalStrategy(timeout=...)"
            )

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if self._paced is not None:
            self._paced.begin(trainer, self._run, self._control)
            clock = self._epoch_clock
            assert clock is not None
            clock.own_pace = self._paced
            call_after_batches(trainer, lambda: clock.after_batch(trainer))

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._trainer_or_none
        if self._paced is not None and trainer is not None and trainer.training:
            dataloader = self._paced.process_dataloader(dataloader, trainer, self._environment.main_address)
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._paced is not None:
            self._paced.begin_training(self._module.trainer)

    @override
    def _dumped(self, dump: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if self._paced is not None and self._may_communicate:
            self._paced.check_save()
        return super()._dumped(dump)

    @override
    def history(self) -> list[str]:
        return super().history() + ([] if self._paced is None else self._paced.lines())


def check_trainer(trainer: pl.Trainer) -> None:
    """Raise a ``ValueError`` for the first setting of a trainer that acts at batches of all nodes."""
    interval = trainer.val_check_interval
    if isinstance(interval, int) or interval != 1.0 or trainer.check_val_every_n_epoch is None:
        raise ValueError(
            f"EverySeconds: Trainer(val_check_interval={interval!r}, check_val_every_n_epoch="
            f"{trainer.check_val_every_n_epoch!r}) validates within epochs, when nodes are at different batches: leave"
            " both out, and validate at the ends of epochs"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set, but not declared
        name = type(callback).__name__
        if isinstance(callback, ModelCheckpoint) and (
            callback._every_n_train_steps or callback._train_time_interval is not None
        ):
            raise ValueError(
                f"EverySeconds: {name}(every_n_train_steps=...) and (train_time_interval=...) save within epochs, when"
                " nodes are at different batches: use every_n_epochs"
            )
        if isinstance(callback, Timer):
            raise ValueError(
                f"EverySeconds: {name}, or Trainer(max_time=...), compares the ranks' time at every batch, but nodes"
                " take unequal numbers of them: use max_steps or max_epochs"
            )
        if isinstance(callback, StochasticWeightAveraging | LearningRateFinder):
            raise ValueError(
                f"EverySeconds: {name} trains steps at which nodes do not synchronize: leave it out, or set sync_every"
                " to a number"
            )


def _has_reached_max_steps(trainer: pl.Trainer) -> bool:
    return 0 <= trainer.max_steps <= trainer.global_step
