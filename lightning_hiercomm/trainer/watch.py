"""The control plane in a Trainer: all ranks stop at the same batch and receive failures of others."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from traceback import walk_tb

from lightning_hiercomm._lightning.ddp import explain_unused_parameters
from lightning_hiercomm._lightning.trainer import is_interrupted, mark_sigterm_received, replace_sigterm_broadcast
from lightning_hiercomm._lightning.tree import pl
from lightning_hiercomm.control.heartbeat import where_waits
from lightning_hiercomm.control.plane import ControlPlane, RankFailure

log = logging.getLogger(__name__)


class LeavesTogether(pl.utilities.exceptions.SIGTERMException):
    """Ends all ranks of a node at the same batch, after one of them received a signal."""


class RunControl(ControlPlane):
    """The control plane of a run, which does nothing until it is started."""

    _is_stopping_together = _has_noted_exception = _is_ending = False
    before_batch: Callable[[], None] = staticmethod(lambda: None)  # stops a single rank; Lightning stops several

    def watch_over(self, trainer: pl.Trainer, leave: Callable[[], object] | None = None) -> None:
        """Stop this trainer's ranks together from now on; a single one if it must ``leave`` other nodes."""
        if self.is_connected or leave is not None:
            before_batch = replace_sigterm_broadcast(trainer, self, leave)
            if not self.is_connected:
                self.before_batch = before_batch

    def exception_to_leave(self) -> LeavesTogether | None:
        """Return the exception that ends training on this node, if one of its ranks received a signal."""
        return LeavesTogether() if self.stops_for == "stop" else None

    def note_progress(self, doing: str, trainer: pl.Trainer | None = None) -> None:
        """Report what this rank does, such as "training batch 7"."""
        where = f" of epoch {trainer.current_epoch}, after {trainer.global_step} steps" if trainer else ""
        self.doing, self.progress = f"{doing}{where}", self.progress + 1

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
            self._is_stopping_together = self.stops_together or isinstance(exception, LeavesTogether)
            if self._is_stopping_together:
                return
        if self._has_noted_exception or not self.is_connected:
            return
        self._has_noted_exception = True
        if isinstance(exception, SystemExit) and not exception.code:
            exception.code = 1  # after 0 torchrun waits 300 s for other nodes
        if isinstance(exception, KeyboardInterrupt):  # a terminal interrupts all ranks: rank 0 reports it
            if self.wait_for_failure(0.0 if self.rank == 0 else 1.0) is None:
                log.warning(self.report_failure(exception))
            return
        # a collective with a dead peer fails before the report about it arrives
        call, _ = where_waits([frame for frame, _ in walk_tb(exception.__traceback__)][-1:])
        broke = isinstance(exception, RuntimeError) and call != "" and "hiercomm" not in call  # errors of our own
        failure = self.wait_for_failure(5.0, collective_broke=True) if broke else self.failure
        note = self.report_failure(exception) if failure is None else f"{self.place} ends because {failure}"
        if failure is not None:  # the cause, another rank, prints more
            exception.__traceback__ = exception.__cause__ = exception.__context__ = None
        if not isinstance(exception, RankFailure):  # which says it
            log.error(note)
            if sys.version_info >= (3, 11):
                exception.add_note(f"lightning_hiercomm: {note}")

    def stop(self, trainer: pl.Trainer | None) -> None:
        """Disconnect."""
        if "stop" in (self.stops_for, self._asked) and trainer is not None:
            mark_sigterm_received(trainer)
        self.close()
