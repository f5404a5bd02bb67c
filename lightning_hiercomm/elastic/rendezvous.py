"""Forms quorums: a node asks the lighthouse until it takes part."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from torch.distributed import Store

from lightning_hiercomm.elastic.healing import Healing
from lightning_hiercomm.elastic.quorum import (
    FINISHED,
    MUST_NOT_BEGIN,
    NodeRefused,
    Progress,
    Quorum,
    Request,
    RunFinished,
    StaleReplica,
    compute_quorum,
)
from lightning_hiercomm.elastic.surroundings import Participant, Surroundings

log = logging.getLogger(__name__)

_POLL = 1.0  # seconds between checks whether a rank of the node has to leave
_REPORT_AFTER = 10.0
_HOPE = 3  # times dead_after: missing nodes may only be slow
_ASKED_AT_MOST = 8  # members that a node asks whether it is stale
_WARN_EVERY = 10  # failures of the same members in a row
_GIVE_UP_AFTER = 30
_ended_here: set[str] = set()
"""The fits that have ended in this process."""


def has_ended_here() -> bool:
    """Whether a run has ended in this process."""
    return bool(_ended_here)


class Rendezvous:
    """Forms quorums for one node. All methods are collective over its ranks, unless documented otherwise.

    Args:
        me: This node, without a replica id.
        around: Reaches the others.
        healing: Declines with every request to heal the nodes that an earlier one has admitted: they have to ask, too.
    """

    def __init__(self, me: Request, around: Surroundings, healing: Healing) -> None:
        self._around = around
        self._healing = healing
        self.me = around.shared(replace(me, replica_id=f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"))
        self.last: Quorum | None = None
        self._has_seen_end = False  # of all members, while it was joining
        self._failures: tuple[frozenset[str], int] = frozenset(), 0  # in a row, and of which members
        self._others_at = 0  # the most known synchronizations of other members of this fit
        if around.lighthouse is not None:
            around.lighthouse.when_back(self._others_have_gone_on)

    def form(self, participant: Participant, admits: bool) -> Quorum:
        """Wait for the next quorum.

        Raises:
            NodeRefused: If this node cannot take part.
            StaleReplica: If the others have synchronized without it.
            RunFinished: If they have finished.
            BaseException: The exception that ends training, if a rank of this node has to leave meanwhile.
        """
        began, position, reported = time.monotonic(), participant.position(), ""
        waits_since: float | None = None
        while True:
            self._healing.decline(self.me)
            number, group = self.me.number + 1, self._around.topology.connected_in
            self.me = replace(self.me, number=number, position=position, admits=admits, group=group)
            while (quorum := self._answer(participant)) is None:
                if self._around.is_first and 0 < time.monotonic() - began - _REPORT_AFTER < _POLL:
                    log.warning("node %s waits for other nodes", self.me.node)
            if not quorum.waits:
                return quorum
            waits_since = (waits_since or time.monotonic()) if quorum.ends_by is not None else None
            seconds = self._around.shared(time.monotonic() - waits_since) if waits_since else 0.0
            if quorum.ends_by is not None and seconds > _HOPE * self._around.elastic.dead_after:
                self._end(quorum.ends_by)
            if reported != quorum.waits and self._around.is_first:
                log.warning("node %s waits: %s", self.me.node, quorum.waits)
            reported = quorum.waits
            time.sleep(0.05)

    def _answer(self, participant: Participant) -> Quorum | None:
        """Return the lighthouse's answer, None if there is none yet, or leave."""
        answer: Any = None
        if self._around.is_first:
            try:
                answer = self._ask_lighthouse()
            except (NodeRefused, SystemExit) as refusal:
                answer = refusal
        gathered = self._around.topology.intra.all_gather_object((answer, participant.leaves_by()))
        answer = gathered[0][0]
        if isinstance(answer, BaseException):
            self._end(answer)
        leaving = next((reason for _, reason in gathered if reason is not None), None)
        if leaving is not None and (answer is None or answer.waits):  # the others do not count on this node yet
            raise leaving
        quorum: Quorum | None = answer
        return quorum

    def _ask_lighthouse(self) -> Quorum | None:
        if self.is_behind:
            raise StaleReplica
        around = self._around
        assert around.lighthouse is not None
        assert around.store is not None
        self.me = me = replace(self.me, finished_at=self._value("finished", around.store))
        answer = around.lighthouse.ask(me.replica_id, me.to_json(), _POLL)
        if answer is None:
            return None
        requests = [request for data in answer if (request := Request.from_json(data)) is not None]
        with_state = [each for each in requests if each.run == me.run and each.has_state]
        if around.lighthouse.was_silent and me.has_state:
            self._check_others_live(with_state, around.lighthouse.address)
        if not me.has_state and with_state:
            self.me = replace(me, begins_at=me.begins_at or MUST_NOT_BEGIN)
            syncs = max(each.progress.syncs for each in with_state)
            self._has_seen_end = max(each.finished_at for each in with_state) >= syncs
        quorum = compute_quorum(requests, me.replica_id, around.elastic.min_nodes)
        if quorum.waits and not me.has_state and self._has_seen_end:
            return replace(quorum, ends_by=RunFinished())
        return quorum

    def commit(self, quorum: Quorum) -> None:
        """Count a synchronization, and publish this node's number of them. Not collective."""
        around = self._around
        self._failures = frozenset(), 0
        syncs = 0 if quorum.begins else self.me.progress.syncs + 1
        self.me = replace(self.me, progress=Progress(quorum.fit, syncs, quorum.token))
        if around.lighthouse is not None and self._others():
            around.lighthouse.was_silent = False  # it is not behind: the others have voted
        if around.store is not None:
            self._publish("syncs", around.store)

    def note_failure(self, quorum: Quorum, reason: str) -> None:
        """Count a synchronization that was rolled back, or after which this joining node got no state.

        Raises:
            NodeRefused: If too many have failed with the same members, and this is the latest node.
        """
        ids = frozenset([self.me.replica_id, *(member.replica_id for member in quorum.members)])
        before, times = self._failures
        times = times + 1 if ids == before else 1
        self._failures = ids, times
        if self._around.is_first:
            level = logging.INFO if times % _WARN_EVERY else logging.WARNING
            node = self.me.node
            log.log(level, "node %s: a synchronization has failed %d times (%s), and is repeated", node, times, reason)
        if times >= _GIVE_UP_AFTER and self.me.replica_id == max(ids):
            others = ", ".join(member.node for member in quorum.members if member.replica_id != self.me.replica_id)
            self._end(
                NodeRefused(
                    f"its synchronization with nodes {others} has failed {times} times ({reason}). Nodes have to reach"
                    " each other at all ports, at the address that HIERCOMM_ADDRESS names; and where 4 MiB take longer"
                    f" than dead_after={self._around.elastic.dead_after:g} s, give Elastic and the lighthouse a larger"
                    " dead_after. Earlier nodes continue without it"
                )
            )

    def finish(self) -> None:
        """Report that the fit has ended on this node: to the other members and the lighthouse. Not collective."""
        around = self._around
        if around.lighthouse is None or self.last is None or not self.me.has_state:
            return
        progress = self.me.progress
        _ended_here.add(progress.fit)
        others = [member.store for member in self._others()]
        around.transport.ask_all(others, partial(self._publish, "finished"))
        self.me = replace(self.me, number=self.me.number + 1, position=FINISHED, finished_at=progress.syncs)
        # lost nodes may delay it
        around.lighthouse.ask(self.me.replica_id, self.me.to_json(), around.elastic.dead_after + 1.0)

    def _end(self, reason: BaseException) -> NoReturn:
        if self._around.is_first:
            log.warning("node %s ends: %s", self.me.node, reason)
        raise reason

    # ---- stale replicas --------------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether the others are known to have synchronized without this node. Not collective."""
        return self.me.has_state and self._others_at > self.me.progress.syncs

    def end_if_behind(self) -> None:
        """End between two synchronizations, because further training would be lost. Not collective."""
        if self._around.is_first and self.is_behind:
            self._end(StaleReplica())

    def _check_others_live(self, with_state: Sequence[Request], lighthouse: str) -> None:
        """After a silence of this node, raise :class:`StaleReplica` if it would continue without all members."""
        others = self._others()
        if not others or {each.replica_id for each in with_state} & {each.replica_id for each in others}:
            return
        if self._others_have_gone_on() is None:
            raise StaleReplica(
                why=f"it was stopped, or did not reach the lighthouse at {lighthouse}, for longer than dead_after, and"
                f" nodes {', '.join(each.node for each in others)} do not answer: they may have finished the run"
                " without it. To continue from their checkpoint, give fit(ckpt_path='last')"
            )
        if self.is_behind:
            raise StaleReplica

    def _others(self) -> list[Request]:
        """Return the other members of the last quorum."""
        return [each for each in self.last.members if each.replica_id != self.me.replica_id] if self.last else []

    def _others_have_gone_on(self) -> bool | None:
        """Ask the last members, in the thread that sends heartbeats; None if none answers."""
        if not self.me.has_state:
            return None
        others = [member.store for member in self._others()][:_ASKED_AT_MOST]
        answers = self._around.transport.ask_all(others, partial(self._value, "syncs"))
        syncs = [number for number in answers.values() if number >= 0]
        self._others_at = max([self._others_at, *syncs])
        return self.is_behind if syncs else None

    def _publish(self, name: str, store: Store) -> None:
        store.set(name, f"{self.me.progress.fit} {self.me.progress.syncs}")

    def _value(self, name: str, store: Store) -> int:
        """Return a number of synchronizations that :meth:`_publish` has stored for this fit; -1 if there is none."""
        fit, _, syncs = store.get(name).decode().partition(" ") if store.check([name]) else ("", "", "")
        return int(syncs) if fit and fit == self.me.progress.fit else -1
