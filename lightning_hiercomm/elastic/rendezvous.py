"""Forms quorums: a node asks the lighthouse, and connects to the members."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from torch.distributed import Store

from lightning_hiercomm.elastic.configuration import Elastic
from lightning_hiercomm.elastic.lighthouse import TorchftLighthouse
from lightning_hiercomm.elastic.quorum import (
    CutOff,
    NodeRefused,
    Quorum,
    Request,
    RunFinished,
    StaleReplica,
    compute_quorum,
)
from lightning_hiercomm.elastic.signature import Signer
from lightning_hiercomm.elastic.topology import ElasticTopology
from lightning_hiercomm.elastic.transport import GlooTransport

log = logging.getLogger(__name__)

T = TypeVar("T")

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


@dataclass
class Surroundings:
    """The objects through which a node reaches the others.

    Attributes:
        elastic: The user's configuration.
        topology: Contains the members of each quorum.
        lighthouse: Forms quorums; on the node's first rank only.
        transport: Reaches other nodes.
        before_change: Called before the topology changes, perhaps repeatedly; its result is called afterwards.
        store: This node's store, which others read; on its first rank only.
        leaves_by: Returns the exception that ends training if this rank has to leave, otherwise None.
        signer: Signs requests, and makes keys.
    """

    elastic: Elastic
    topology: ElasticTopology
    lighthouse: TorchftLighthouse | None
    transport: GlooTransport
    before_change: Callable[[], Callable[[], None]]
    store: Store | None = None
    leaves_by: Callable[[], BaseException | None] = lambda: None
    signer: Signer = field(default_factory=Signer)


class Rendezvous:
    """Forms quorums for one node. All methods are collective over its ranks, unless documented otherwise."""

    def __init__(
        self,
        me: Request,
        around: Surroundings,
        on_request: Callable[[Request], None],
        on_failure: Callable[[Quorum], None],
    ) -> None:
        self._around = around
        self._intra = around.topology.intra
        self._on_request = on_request
        self._on_failure = on_failure
        if self.is_first:
            me = replace(me, replica_id=f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}")
        self.me: Request = self._shared(me)
        self.last: Quorum | None = None
        self._has_seen_end = False  # of all members, while it was joining
        self._failures: tuple[frozenset[str], int] = frozenset(), 0  # in a row, and of which members
        self._others_at = 0  # the most known synchronizations of other members of this fit
        if around.lighthouse is not None:
            around.lighthouse.when_back(self._others_have_gone_on)

    @property
    def is_first(self) -> bool:
        """Whether this rank communicates for the node."""
        return self._intra.rank == 0

    def form(self, position: str, admits: bool) -> Quorum:
        """Wait for the next quorum, and connect to its members.

        Raises:
            NodeRefused: If this node cannot take part.
            StaleReplica: If the others have synchronized without it.
            RunFinished: If they have finished.
            BaseException: The exception that ends training, if a rank of this node has to leave meanwhile.
        """
        began, reported = time.monotonic(), ""
        hopeless_since: float | None = None
        while True:
            self.me = replace(self.me, number=self.me.number + 1, position=position, admits=admits)
            self._on_request(self.me)
            quorum = self._ask(began)
            if quorum.waits:
                hopeless_since = (hopeless_since or time.monotonic()) if quorum.is_hopeless else None
                silence = self._shared(time.monotonic() - hopeless_since) if hopeless_since else 0.0
                if silence > _HOPE * self._around.elastic.dead_after:
                    self._end(RunFinished() if quorum.is_finished else NodeRefused(quorum.waits))
                if reported != quorum.waits and self.is_first:
                    log.warning("node %s waits: %s", self.me.node, quorum.waits)
                reported = quorum.waits
                time.sleep(0.05)
            elif quorum.source_of(self.me.replica_id) is not None or self._connect(quorum):
                self.last = quorum
                return quorum
            else:
                self._on_failure(quorum)

    def _ask(self, began: float) -> Quorum:
        while True:
            answer: Any = None
            if self.is_first:
                try:
                    answer = self._ask_lighthouse()
                except (NodeRefused, SystemExit) as refusal:
                    answer = refusal
            gathered = self._intra.all_gather_object((answer, self._around.leaves_by()))
            answer = gathered[0][0]
            if isinstance(answer, BaseException):
                self._end(answer)
            leaving = next((reason for _, reason in gathered if reason is not None), None)
            if leaving is not None and (answer is None or answer.waits):  # the others do not count on this node yet
                raise leaving
            if answer is not None:
                quorum: Quorum = answer
                return quorum
            if self.is_first and 0 < time.monotonic() - began - _REPORT_AFTER < _POLL:
                log.warning("node %s waits for other nodes", self.me.node)

    def _ask_lighthouse(self) -> Quorum | None:
        if self.is_behind:
            raise StaleReplica
        around = self._around
        assert around.lighthouse is not None
        assert around.store is not None
        self.me = me = replace(self.me, finished_at=self._value("finished", around.store))
        answer = around.lighthouse.ask(me.replica_id, around.signer.signed(me.to_json()), _POLL)
        if answer is None:
            return None
        sent = [(data, request) for data in answer if (request := Request.from_json(data)) is not None]
        requests = [request for data, request in sent if around.signer.verifies(data)]
        with_state = [each for each in requests if each.run == me.run and each.has_state]
        if around.lighthouse.was_silent and me.has_state:
            self._check_others_live(with_state, around.lighthouse.address)
        if not me.has_state and with_state:
            self.me = replace(me, expects_state=True)
            self._has_seen_end = max(each.finished_at for each in with_state) >= max(each.syncs for each in with_state)
        if len(requests) < len(sent) and not any(each.has_state for each in requests):
            strangers = [request.node for _, request in sent if request not in requests]
            return Quorum(waits=f"nodes {strangers} have another HIERCOMM_TOKEN, or none")
        quorum = compute_quorum(requests, me.replica_id, around.elastic.min_nodes, around.elastic.max_nodes)
        if quorum.waits and not me.has_state and self._has_seen_end:
            return replace(quorum, is_hopeless=True, is_finished=True)
        return quorum

    def _check_others_live(self, with_state: Sequence[Request], lighthouse: str) -> None:
        """After a silence of this node, raise :class:`CutOff` if it would continue without all former members."""
        others = self._others()
        if not others or {each.replica_id for each in with_state} & {each.replica_id for each in others}:
            return
        if self._others_have_gone_on() is None:
            raise CutOff(lighthouse=lighthouse, others=", ".join(each.node for each in others))
        if self.is_behind:
            raise StaleReplica

    def _others(self) -> list[Request]:
        """Return the other members of the last quorum."""
        return [each for each in self.last.members if each.replica_id != self.me.replica_id] if self.last else []

    # ---- stale replicas --------------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether the others are known to have synchronized without this node. Not collective."""
        return self.me.has_state and self._others_at > self.me.syncs

    def end_if_behind(self) -> None:
        """End between two synchronizations, because further training would be lost. Not collective."""
        if self.is_first and self.is_behind:
            self._end(StaleReplica())

    def _others_have_gone_on(self) -> bool | None:
        """Ask the last members, in the thread that sends heartbeats; None if none answers."""
        if not self.me.has_state:
            return None
        others = [member.store for member in self._others()][:_ASKED_AT_MOST]
        answers = self._around.transport.ask_all(others, partial(self._value, "syncs"))
        syncs = [number for number in answers.values() if number >= 0]
        self._others_at = max([self._others_at, *syncs])
        return self.is_behind if syncs else None

    def note_syncs(self) -> None:
        """Publish this node's number of synchronizations. Not collective."""
        if self._around.lighthouse is not None and self._others():
            self._around.lighthouse.was_silent = False  # it is not behind: the others have voted
        if self._around.store is not None:
            self._publish("syncs", self._around.store)

    def finish(self) -> None:
        """Report that the fit has ended on this node: to the other members and the lighthouse. Not collective."""
        around = self._around
        if around.lighthouse is None or self.last is None or not self.me.has_state:
            return
        _ended_here.add(self.me.fit)
        others = [member.store for member in self._others()]
        around.transport.ask_all(others, partial(self._publish, "finished"))
        self.me = replace(self.me, number=self.me.number + 1, finished_at=self.me.syncs, is_finished=True)
        data = around.signer.signed(self.me.to_json())
        around.lighthouse.ask(self.me.replica_id, data, around.elastic.dead_after + 1.0)  # lost nodes may delay it

    def _publish(self, name: str, store: Store) -> None:
        store.set(self._around.signer.key(name), f"{self.me.fit} {self.me.syncs}")

    def _value(self, name: str, store: Store) -> int:
        """Return a number of synchronizations that :meth:`_publish` has stored for this fit; -1 if there is none."""
        key = self._around.signer.key(name)
        fit, _, syncs = store.get(key).decode().partition(" ") if store.check([key]) else ("", "", "")
        return int(syncs) if fit and fit == self.me.fit else -1

    def _end(self, reason: BaseException) -> NoReturn:
        if self.is_first:
            log.warning("node %s ends: %s", self.me.node, reason)
        raise reason

    # ---- connections -----------------------------------------------------------------------------------------------

    def _connect(self, quorum: Quorum) -> bool:
        """Connect to all members, unless they are connected; return whether all ranks of this node are."""
        index = quorum.index(self.me.replica_id)
        if index is None:
            return False
        if quorum.is_connected:
            return True
        topology, local, error = self._around.topology, self._around.topology.local_rank, ""
        topology.disconnect()
        after_change = self._around.before_change()  # pending collectives must not reach the new groups
        topology.breaker.reset()
        has_group = len(quorum.members) > 1 and local < min(member.ranks for member in quorum.members)
        try:
            for number, group in enumerate(topology.all_groups):
                name = f"{local}.{number}"
                connect = self._around.transport.connect_group
                group.connect(connect(quorum, index, name, topology.meter) if has_group else None)
        except RuntimeError as raised:
            error = str(raised).splitlines()[0]
        failures = [each for each in self._intra.all_gather_object(error) if each]
        if failures:
            if self.is_first:
                names = ", ".join(member.node for member in quorum.members)
                log.info("node %s cannot connect to nodes %s: %s", self.me.node, names, failures[0])
            self.disconnect()
            self.note_failure(quorum, failures[0])
            return False
        topology.reform([member.ranks for member in quorum.members], index)
        after_change()
        self.me = replace(self.me, group=quorum.group)
        return True

    def disconnect(self) -> None:
        """Close all connections to other nodes, whose pending collectives fail at once. Not collective."""
        self._around.topology.disconnect()
        self.me = replace(self.me, group="")

    def disconnect_if_broken(self) -> None:
        """Close all connections if an overlapped collective has failed on a rank of this node."""
        topology = self._around.topology
        if len(topology.all_groups) > 1 and any(self._intra.all_gather_object(not topology.breaker.is_intact)):
            self.disconnect()

    def note_failure(self, quorum: Quorum, reason: str) -> None:
        """Count a synchronization that was rolled back, or after which this joining node got no state.

        Raises:
            NodeRefused: If too many have failed with the same members, and this is the latest node.
        """
        ids = frozenset([self.me.replica_id, *(member.replica_id for member in quorum.members)])
        before, times = self._failures
        times = times + 1 if ids == before else 1
        self._failures = ids, times
        if times % _WARN_EVERY == 0 and self.is_first:
            node = self.me.node
            log.warning("node %s: a synchronization has failed %d times (%s), and is repeated", node, times, reason)
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

    def forget_failures(self) -> None:
        """Reset the count of failures. Not collective."""
        self._failures = frozenset(), 0

    def _shared(self, value: T) -> T:
        shared: T = self._intra.all_gather_object(value if self.is_first else None)[0]
        return shared
