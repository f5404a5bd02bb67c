"""One node's membership in an elastic run: quorums, votes, recovery, and its shards of the data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lightning_hiercomm.elastic.healing import Healing
from lightning_hiercomm.elastic.history import ElasticHistory
from lightning_hiercomm.elastic.partition import DataShards
from lightning_hiercomm.elastic.quorum import Quorum, Request
from lightning_hiercomm.elastic.rendezvous import Rendezvous, Surroundings
from lightning_hiercomm.elastic.vote import Vote

log = logging.getLogger(__name__)


class Membership:
    """This node's membership in the run. All methods are collective over its ranks, unless documented otherwise."""

    def __init__(self, me: Request, around: Surroundings, device: torch.device | None = None) -> None:
        self._intra = around.topology.intra
        self._around = around
        self.healing = Healing(around, device)
        self.votes = Vote(around)
        # a member that cannot connect rejects its joining nodes: they would wait for its state
        self.rendezvous = Rendezvous(me, around, self.healing.note_request, self._reject_joining)
        self.history = ElasticHistory()
        self.shards = DataShards()
        self._nodes: dict[str, str] = {}

    @property
    def me(self) -> Request:
        return self.rendezvous.me

    @property
    def is_first(self) -> bool:
        """Whether this rank communicates for the node."""
        return self.rendezvous.is_first

    @property
    def leads(self) -> bool:
        """Whether this node is the first member of the last quorum, and so writes the checkpoints."""
        quorum = self.rendezvous.last
        return quorum is None or quorum.index(self.me.replica_id) == 0

    def own_shards(self) -> tuple[int, tuple[int, ...]]:
        """Return the number of shards of the data, and those of this node's ranks; none before the first quorum."""
        return self.shards.current.total, self.shards.current.shards.get(self.me.replica_id, ())

    def form_quorum(self, position: str, admits: bool = False) -> Quorum:
        """Wait for all other living nodes, and connect to them; see :meth:`Rendezvous.form`."""
        self.rendezvous.disconnect_if_broken()
        self.healing.reject_waiting()
        quorum = self.rendezvous.form(position, admits)
        self._note_nodes(quorum)
        return quorum

    def _note_nodes(self, quorum: Quorum) -> None:
        nodes = {member.replica_id: member.node for member in (*quorum.members, *quorum.joining)}
        if self._nodes:
            left = [f"node {node} has left" for replica, node in self._nodes.items() if replica not in nodes]
            joined = [f"node {node} joins" for replica, node in nodes.items() if replica not in self._nodes]
            if left or joined:
                count = len(quorum.members)
                continues = "1 node continues" if count == 1 else f"{count} nodes continue"
                event = f"{', '.join(left + joined)}; {continues}, after sync {self.me.syncs}"
                self.history.note(event)
                if self.is_first:
                    log.warning("%s", event)
        self._nodes = nodes
        self.history.nodes = len(quorum.members)

    def vote(self, quorum: Quorum, succeeded: bool) -> bool:
        """Return whether all members have succeeded in the exchange, given whether all ranks of this node have."""
        decision = self.votes.decide(quorum, self.me.replica_id, succeeded) if self.is_first else None
        is_kept: bool | None = self._intra.all_gather_object(decision)[0]
        if not is_kept:
            self.rendezvous.disconnect()
            self._reject_joining(quorum)
        return bool(is_kept)

    def _reject_joining(self, quorum: Quorum) -> None:
        self.healing.reject(quorum.recovering_from(self.me.replica_id))

    def commit(self, quorum: Quorum, batches: int, exchanges_steps: bool = True) -> None:
        """Update this node's state after a successful vote.

        ``batches`` counts the batches of each rank so far; ``exchanges_steps`` is whether the exchange averages them.
        """
        self.rendezvous.forget_failures()
        self.votes.commit(quorum)
        self.history.admit([each.replica_id for each in quorum.joining], [each.replica_id for each in quorum.members])
        self.history.lost_batches += self.shards.commit(quorum, batches, exchanges_steps)
        syncs = 0 if quorum.begins else self.me.syncs + 1
        self._update({"fit": quorum.fit, "syncs": syncs, "last_quorum": quorum.token})
        self.rendezvous.note_syncs()
        self.healing.commit(quorum.recovering_from(self.me.replica_id))

    def _update(self, progress: dict[str, Any]) -> None:
        self.rendezvous.me = replace(self.me, **progress)

    def begin_epoch(self, batches: int) -> bool:
        """Partition the data among all nodes of the last quorum; return whether that changes this node's shards."""
        before = self.own_shards()
        self.shards.begin_epoch(batches)
        return before != self.own_shards()

    def heal(self, source: Request) -> dict[str, Any] | None:
        """Return the run's state from a member, and adopt its progress; None if it sends none."""
        state = self.healing.fetch(source, self.me)
        if state is None:
            assert self.rendezvous.last is not None, "it names the source"
            self.rendezvous.note_failure(self.rendezvous.last, f"no state from node {source.node}")
            return None
        if self.is_first:
            log.warning("node %s receives the state of node %s", self.me.node, source.node)
        about = state["node"]
        self.shards.load(*about["shards"])
        vars(self.history).update(about["history"])
        self._update(about["progress"])
        return state

    def give_state(self, state: Callable[[], dict[str, Any] | None]) -> None:
        """Send ``state()`` to nodes that wait for this one; None rejects them."""
        progress = {name: getattr(self.me, name) for name in ("fit", "syncs", "last_quorum")}
        about = {"progress": progress, "shards": self.shards.state(), "history": self.history.common()}
        self.healing.send(state, about)

    def leave(self, at_once: bool = False, is_over: bool = True) -> None:
        """Leave the run, unless ``at_once`` after others have read this node's votes and states. Not collective."""
        if is_over:
            self.rendezvous.finish()
        if self._around.lighthouse is not None:
            self._around.lighthouse.leave()
        if not at_once and self.is_first:
            self.healing.finish()
            self.votes.finish()
        self._around.transport.finish()
        self.rendezvous.disconnect()
        self._around.store = None  # the last reference keeps it open
