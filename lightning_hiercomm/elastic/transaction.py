"""A transaction around each agreement: who is there, the exchange, a vote; or all is taken back, and once more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from lightning_hiercomm.comm.base import CommunicationError
from lightning_hiercomm.elastic.membership import Membership
from lightning_hiercomm.elastic.quorum import Quorum
from lightning_hiercomm.elastic.topology import ElasticTopology
from lightning_hiercomm.schemes.health.nonfinite import NonfiniteError

log = logging.getLogger(__name__)


class Transaction:
    """What nodes do together happens on all of them, or on none.

    Args:
        membership: Says who takes part, and counts the votes.
        topology: Holds them meanwhile.
        undo_point: Remembers all that an agreement changes; what it returns takes it back.
        position: Says where in the training this node is.
        batches: Says how many batches a rank has trained on so far.
        settle: Waits for what is under way beside training.
    """

    def __init__(
        self,
        membership: Membership,
        topology: ElasticTopology,
        undo_point: Callable[[], Callable[[], None]],
        position: Callable[[], str],
        batches: Callable[[], int],
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self._membership = membership
        self._topology = topology
        self._undo_point = undo_point
        self._position = position
        self._batches = batches
        self._settle = settle
        self._is_inside = False
        self._why = ""

    def __call__(self, work: Callable[[], object], admits: bool = False, brings: bool = True) -> None:
        """Let the nodes do ``work`` together, whoever is there; see :meth:`ElasticTopology.agreement`."""
        if self._is_inside:
            work()
            return
        quorum = self.begin(work, admits, brings)
        assert quorum is None, "a node that trains has state"

    def begin(self, work: Callable[[], object], admits: bool, brings: bool = True) -> Quorum | None:
        """The same; for a newcomer, the meeting after which it gets its state, in place of taking part."""
        began, tries, before = time.monotonic(), 0, self._membership.history.nodes
        while True:
            tries += 1
            self._settle()  # or it would be lost on the way, if others connect anew
            self._membership.note_connections()
            quorum = self._membership.form_quorum(self._position(), admits)
            if quorum.source_of(self._membership.me.replica_id) is not None:
                return quorum
            undo = self._undo_point()
            is_well = self._attempt(work)
            if self._membership.vote(quorum, is_well):
                break
            undo()
            self._membership.note_failure(quorum, self._why or "on another node")
        self._membership.commit(quorum, self._batches(), brings)
        if tries > 1 or len(quorum.members) < before:
            self._membership.history.lost_seconds += time.monotonic() - began
        return None

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Do it; whether no move between nodes has failed on this rank."""
        breaker, raised = self._topology.breaker, None
        self._topology.open()
        self._is_inside = True
        try:
            work()
        except (CommunicationError, NonfiniteError) as error:
            raised = error  # perhaps of what never arrived: the whole node finds out together
        finally:
            self._topology.shut()
            self._is_inside = False
        found = self._topology.intra.all_gather_object((breaker.error, raised is not None))
        lost = [error for error, _ in found if error is not None]
        if not lost and raised is not None:
            raise raised
        self._why = str(lost[0]) if lost else ""
        if lost:
            log.debug("an exchange failed: %s", lost[0])
        return not lost and not any(has_raised for _, has_raised in found)
