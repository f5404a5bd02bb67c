"""A transaction around each synchronization: form a quorum, exchange, vote; roll back and repeat if it has failed."""

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
    """Runs synchronizations on all members of a quorum, or on none.

    Args:
        membership: Forms quorums, and counts votes.
        topology: Connects the members.
        undo_point: Returns a callback that rolls back a synchronization.
        position: Returns a description of this node's position in training.
        batches: Returns how many batches a rank has trained on so far.
        settle: Waits for overlapped collectives.
    """

    def __init__(
        self,
        membership: Membership,
        topology: ElasticTopology,
        undo_point: Callable[[], Callable[[], None]],
        position: Callable[[], str],
        batches: Callable[[], int],
        settle: Callable[[], object],
    ) -> None:
        self._membership = membership
        self._topology = topology
        self._undo_point = undo_point
        self._position = position
        self._batches = batches
        self._settle = settle
        self._is_inside = False
        self._error = ""

    def __call__(self, work: Callable[[], object], admits: bool = False, exchanges_steps: bool = True) -> None:
        """Run ``work`` with the living nodes; see :meth:`ElasticTopology.synchronize`."""
        if self._is_inside:
            work()
            return
        quorum = self.begin(work, admits, exchanges_steps)
        assert quorum is None, "a node that trains has state"

    def begin(self, work: Callable[[], object], admits: bool, exchanges_steps: bool = True) -> Quorum | None:
        """Run ``work``; a joining node instead returns the quorum after which it gets its state."""
        membership = self._membership
        began, attempts, nodes_before = time.monotonic(), 0, membership.history.nodes
        while True:
            attempts += 1
            self._settle()  # new connections would drop pending collectives
            quorum = membership.form_quorum(self._position(), admits)
            if quorum.source_of(membership.me.replica_id) is not None:
                return quorum
            undo = self._undo_point()
            if membership.vote(quorum, self._attempt(work)):
                break
            undo()
            membership.rendezvous.note_failure(quorum, self._error or "on another node")
        membership.commit(quorum, self._batches(), exchanges_steps)
        if attempts > 1 or len(quorum.members) < nodes_before:
            membership.history.lost_seconds += time.monotonic() - began
        return None

    def _attempt(self, work: Callable[[], object]) -> bool:
        breaker, raised = self._topology.breaker, None
        self._topology.open()
        self._is_inside = True
        try:
            work()
        except (CommunicationError, NonfiniteError) as error:
            raised = error  # a failed collective may be the cause: all ranks of the node check that together
        finally:
            self._topology.shut()
            self._is_inside = False
        gathered = self._topology.intra.all_gather_object((breaker.error, raised is not None))
        errors = [error for error, _ in gathered if error is not None]
        if not errors and raised is not None:
            raise raised
        self._error = str(errors[0]) if errors else ""
        return not errors and not any(has_raised for _, has_raised in gathered)
