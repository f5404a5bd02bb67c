"""A transaction around each synchronization: form a quorum, exchange, vote; roll back and repeat if it has failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning_hiercomm.comm.base import CommunicationError
from lightning_hiercomm.elastic.membership import Membership
from lightning_hiercomm.elastic.quorum import Quorum
from lightning_hiercomm.elastic.surroundings import Participant
from lightning_hiercomm.schemes.nonfinite import NonfiniteError


class Transaction:
    """Runs synchronizations of a participant on all members of a quorum, or on none."""

    def __init__(self, membership: Membership, participant: Participant) -> None:
        self._membership = membership
        self._participant = participant
        self._is_inside = False

    def __call__(self, work: Callable[[], object], admits: bool = False) -> None:
        """Run ``work`` with the living nodes; see :meth:`ElasticTopology.synchronize`."""
        if self._is_inside:
            work()
            return
        state = self.begin(work, admits)
        assert state is None, "a node that trains has state"

    def begin(self, work: Callable[[], object], admits: bool) -> dict[str, Any] | None:
        """Run ``work``, or return the state from which this node recovers if others have trained before."""
        membership, participant = self._membership, self._participant
        around, me = membership.around, membership.me.replica_id
        began, attempts, nodes_before = time.monotonic(), 0, membership.history.nodes
        while True:
            attempts += 1
            quorum = membership.rendezvous.form(participant, admits)
            if (index := quorum.index(me)) is None:
                membership.note(quorum)
                source = quorum.source_of(me)
                if (state := membership.healing.fetch(source, membership.me)) is not None:
                    membership.adopt(state, source)
                    return state
                membership.rendezvous.note_failure(quorum, f"no state from node {source.node}")
                continue
            error = None if quorum.is_connected else self._connect(quorum, index)
            if error is None:
                membership.note(quorum)
                undo = participant.undo_point()
                error = self._attempt(work)
                if membership.votes.decide(quorum, me, error is None):
                    break
                around.topology.disconnect()
                undo()
            membership.rendezvous.note_failure(quorum, error or "on another node")
        membership.commit(quorum)
        if attempts > 1 or len(quorum.members) < nodes_before:
            membership.history.lost_seconds += time.monotonic() - began
        return None

    def _connect(self, quorum: Quorum, index: int) -> str | None:
        """Connect to all members; return the error of a rank."""
        around = self._membership.around
        around.topology.disconnect()
        after_change = self._participant.before_change()
        error = around.topology.connect_members(quorum, index, around.transport)
        if error is None:
            after_change()
        return error

    def _attempt(self, work: Callable[[], object]) -> str | None:
        """Run ``work``; return the first error of a rank of this node."""
        topology, raised = self._membership.around.topology, None
        topology.open()
        self._is_inside = True
        try:
            work()
        except (CommunicationError, NonfiniteError) as error:
            raised = error  # a failed collective may be the cause: all ranks of the node check that together
        finally:
            topology.shut()
            self._is_inside = False
        gathered = topology.intra.all_gather_object((topology.inter_group.error, raised is not None))
        errors = [str(error) for error, _ in gathered if error is not None]
        if not errors and raised is not None:
            raise raised
        return errors[0] if errors else "on another rank" if any(has_raised for _, has_raised in gathered) else None
