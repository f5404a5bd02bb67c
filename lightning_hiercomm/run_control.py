"""The control plane in a Trainer: all ranks stop at one batch, and learn of a failure."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hiercomm import _lightning
from lightning_hiercomm.control import ControlPlane, Invitation, RankFailure, start_control_plane
from lightning_hiercomm.topology import Topology

log = logging.getLogger(__name__)


class RunControl:
    """Starts a :class:`~lightning_hiercomm.control.ControlPlane` with the processes, and ends it with them."""

    def __init__(self) -> None:
        self._control: ControlPlane | None = None
        self._is_stopping_together = False
        self._has_noted_exception = False

    def start(
        self, topology: Topology, host: str, port: int, broadcast: Callable[[Invitation | None], Invitation | None]
    ) -> None:
        """Connect the ranks, if there are several and they are not connected; collective.

        Args:
            topology: The nodes.
            host: An address of rank 0 that every rank can reach.
            port: Where rank 0 listens; 0 for any free port.
            broadcast: Gives all ranks what rank 0 gives.
        """
        if topology.world_size > 1 and self._control is None:
            place = f"rank {topology.rank} (node {topology.node})"
            self._control = start_control_plane(
                topology.rank,
                topology.world_size,
                place,
                host,
                port,
                broadcast=broadcast,
                gather=topology.world.all_gather_object,
            )

    def watch_over(self, trainer: pl.Trainer) -> None:
        """Stop this trainer's ranks together from now on."""
        if self._control is not None:
            _lightning.replace_sigterm_broadcast(trainer, self._control.should_stop, self._control.request_stop)

    def ranks_are_together(self, trainer: pl.Trainer | None) -> bool:
        """False while an exception is handled that only this rank may have: no collective would end."""
        return self._is_stopping_together or not _lightning.is_interrupted(trainer)

    def note_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, or learn from them what happened. Called before the user's callbacks."""
        if isinstance(exception, SIGTERMException):
            # without a control plane Lightning's own broadcast stops all ranks at one batch
            self._is_stopping_together = self._control is None or self._control.stops_together
            if self._is_stopping_together:
                return
        if self._control is None or self._has_noted_exception or isinstance(exception, RankFailure):
            return
        self._has_noted_exception = True
        # a peer that is gone breaks our collective before the news of it arrives
        heard = self._control.wait_for_failure(2.0) if isinstance(exception, RuntimeError) else self._control.failure
        if heard is None:
            self._control.report_failure(exception)
            note = f"{self._control.place} failed: {type(exception).__name__}: {exception}"
        else:
            note = f"{self._control.place} ends because {heard}"
        log.error(note)
        if sys.version_info >= (3, 11):
            exception.add_note(f"lightning_hiercomm: {note}")

    def stop(self, trainer: pl.Trainer | None) -> None:
        """Leave the trainer as it was, and disconnect."""
        if trainer is not None:
            _lightning.restore_sigterm_broadcast(trainer)
        if self._control is not None:
            if self._control.stop_requested and trainer is not None:
                _lightning.mark_sigterm_received(trainer)
            self._control.close()
            self._control = None
