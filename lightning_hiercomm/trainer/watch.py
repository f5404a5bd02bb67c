"""The control plane in a Trainer: all ranks stop at the same batch and receive failures of others."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from torch.distributed import Store

from lightning_hiercomm._lightning.collectives import collectives_begun, collectives_of_default_group, gpu_is_busy
from lightning_hiercomm._lightning.ddp import explain_unused_parameters
from lightning_hiercomm._lightning.trainer import (
    OneRank,
    is_interrupted,
    mark_sigterm_received,
    replace_sigterm_broadcast,
)
from lightning_hiercomm._lightning.tree import pl
from lightning_hiercomm.control.plane import ControlPlane, RankFailure
from lightning_hiercomm.control.reports import Purpose
from lightning_hiercomm.control.waiting import MainThread, is_of_collective

log = logging.getLogger(__name__)


_IS_CONSEQUENCE = "_is_consequence_of_another_rank"


def _show(
    before: Callable[..., Any], kind: type[BaseException], value: BaseException, traceback: TracebackType | None
) -> None:
    """Print the message alone of an exception that another rank has caused; other exceptions by the hook before."""
    if hasattr(value, _IS_CONSEQUENCE):
        value.__cause__ = value.__context__ = value.__traceback__ = traceback = None
    before(kind, value, traceback)


def print_without_traceback(exception: BaseException) -> None:
    """Let this process, if the exception ends it, print the message alone: another rank, the cause, prints more."""
    setattr(exception, _IS_CONSEQUENCE, True)  # a reference would keep the model in memory if the program continues
    if getattr(sys.excepthook, "func", None) is not _show:
        sys.excepthook = partial(_show, sys.excepthook)


class LeavesTogether(pl.utilities.exceptions.SIGTERMException):
    """Ends all ranks of a node at the same batch, after one of them received a signal."""


class RunControl:
    """Starts and ends a rank's :class:`~lightning_hiercomm.control.plane.ControlPlane`.

    Attributes:
        steps: Returns how often each optimizer has stepped; None outside of a run.
    """

    def __init__(self) -> None:
        self.plane: ControlPlane | None = None
        self.steps: Callable[[], Sequence[int]] | None = None
        self._is_stopping_together = self._has_noted_exception = self._is_ending = False
        self._ranks: ControlPlane | OneRank | None = None
        self._before_batch: Callable[[], None] | None = None

    def start(
        self,
        rank: int,
        size: int,
        node: int,
        store: Store | None,
        hang_timeout: float | None,
        gather: Callable[..., list[Any]],
        timeout: float | None = None,
    ) -> None:
        """Connect the ranks if they are not connected. Collective.

        The arguments are those of :class:`ControlPlane`; ``store`` is None if the process group has none.
        """
        if self.plane is not None:
            return
        self._is_stopping_together = self._has_noted_exception = self._is_ending = False  # of the run before
        if store is None:
            log.warning("No control plane, because the default process group has no store: ranks wait for each other")
            return
        main_thread = MainThread(collectives_begun, gpu_is_busy, collectives_of_default_group)
        place = f"rank {rank} (node {node})"
        self.plane = ControlPlane(rank, size, place, 4.0, hang_timeout, main_thread, timeout)
        self.plane.start(store, gather)

    def watch_over(self, trainer: pl.Trainer, leave: Callable[[], object] | None = None) -> None:
        """Stop this trainer's ranks together from now on."""
        if self.plane is not None:
            self._ranks = self.plane
            replace_sigterm_broadcast(trainer, self.plane, leave)
        elif leave is not None:  # Lightning must not save inside the signal's handler
            self._ranks = OneRank(trainer)
            self._before_batch = replace_sigterm_broadcast(trainer, self._ranks, leave)

    def before_batch(self) -> None:
        """Stop a node of one rank before a batch, if it received a signal."""
        if self._before_batch is not None:
            self._before_batch()

    def exception_to_leave(self) -> LeavesTogether | None:
        """Return the exception that ends training on this node, if one of its ranks received a signal."""
        is_due = self._ranks is not None and self._ranks.stop_requested
        return LeavesTogether() if is_due else None

    def note_start(self) -> None:
        """Report that this rank is about to train."""
        if self.plane is not None:
            self.plane.doing = "beginning to train"

    def note_progress(self, doing: str, trainer: pl.Trainer | None) -> None:
        """Report what this rank does, such as "training batch 7"."""
        if self.plane is not None:
            where = f" of epoch {trainer.current_epoch}, after {trainer.global_step} steps" if trainer else ""
            self.plane.note_progress(f"{doing}{where}")

    def barrier(self, purpose: Purpose = "average", what: str = "") -> None:
        """Wait for all ranks on the control plane, before they exchange data outside of a training step.

        Raises:
            RankFailure: If another rank failed, continues to train, or has taken another number of steps.
        """
        if self.plane is not None:
            self.plane.barrier(purpose, what, () if self.steps is None else self.steps())

    def ranks_are_together(self, trainer: pl.Trainer | None) -> bool:
        """Return False while this rank handles an exception that others may not have: no collective would end."""
        return self._is_stopping_together or not self.is_interrupted(trainer)

    def is_interrupted(self, trainer: pl.Trainer | None) -> bool:
        """Return whether an exception is being handled. Lightning does not report this of forked or spawned ranks."""
        return self._is_ending or is_interrupted(trainer)

    def note_exception(self, exception: BaseException, module: pl.LightningModule | None = None) -> None:
        """Report an exception to the other ranks, or add a note with the failure that caused it."""
        self._is_ending = True
        explain_unused_parameters(exception, module)
        if isinstance(exception, pl.utilities.exceptions.SIGTERMException):
            # without a control plane Lightning's own broadcast stops all ranks at the same batch
            self._is_stopping_together = (
                self.plane is None or self.plane.stops_together or isinstance(exception, LeavesTogether)
            )
            if self._is_stopping_together:
                return
        if isinstance(exception, RankFailure):
            print_without_traceback(exception)
            return
        if self.plane is None or self._has_noted_exception:
            return
        self._has_noted_exception = True
        if isinstance(exception, SystemExit) and not exception.code:
            exception.code = 1  # after 0 torchrun waits 300 s for other nodes
        if isinstance(exception, KeyboardInterrupt):  # a terminal interrupts all ranks: rank 0 reports it
            if self.plane.wait_for_failure(0.0 if self.plane.rank == 0 else 1.0) is None:
                log.warning(self.plane.report_failure(exception))
            return
        # a collective with a dead peer fails before the report about it arrives
        may_be_consequence = isinstance(exception, RuntimeError) and is_of_collective(exception)
        failure = self.plane.wait_for_failure(5.0, collective_broke=True) if may_be_consequence else self.plane.failure
        if failure is None:
            note = self.plane.report_failure(exception)
        else:
            note = f"{self.plane.place} ends because {failure}"
            print_without_traceback(exception)
        log.error(note)
        if sys.version_info >= (3, 11):
            exception.add_note(f"lightning_hiercomm: {note}")

    def stop(self, trainer: pl.Trainer | None) -> None:
        """Disconnect."""
        self._ranks = self._before_batch = self.steps = None
        if self.plane is not None:
            if self.plane.stop_requested and trainer is not None:
                mark_sigterm_received(trainer)
            self.plane.close()
            self.plane = None
