"""One node's membership in an elastic run: what it has synchronized, its shards of the data, and its history."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lightning_hiercomm.elastic.data_partition import DataShards
from lightning_hiercomm.elastic.healing import Healing
from lightning_hiercomm.elastic.history import ElasticHistory
from lightning_hiercomm.elastic.quorum import Progress, Quorum, Request
from lightning_hiercomm.elastic.rendezvous import Rendezvous
from lightning_hiercomm.elastic.surroundings import Surroundings
from lightning_hiercomm.elastic.vote import Vote

log = logging.getLogger(__name__)


class Membership:
    """This node's membership in the run. Its methods are not collective, unless documented otherwise."""

    def __init__(self, me: Request, around: Surroundings, device: torch.device | None = None) -> None:
        self.around = around
        self.healing = Healing(around, device)
        self.votes = Vote(around)
        self.rendezvous = Rendezvous(me, around, self.healing)
        self.history = ElasticHistory()
        self.shards = DataShards(self.me.replica_id)

    @property
    def me(self) -> Request:
        return self.rendezvous.me

    @property
    def leads(self) -> bool:
        """Whether this node is the first member of the last quorum, and so writes the checkpoints."""
        quorum = self.rendezvous.last
        return quorum is None or quorum.index(self.me.replica_id) == 0

    def note(self, quorum: Quorum) -> None:
        """Keep a quorum in which this node takes part, and report which nodes have left and joined since the last."""
        before, nodes = {} if self.rendezvous.last is None else self.rendezvous.last.nodes, quorum.nodes
        self.rendezvous.last = quorum
        left = [f"node {node} has left" for replica, node in before.items() if replica not in nodes]
        joined = [f"node {node} joins" for replica, node in nodes.items() if replica not in before]
        if before and (left or joined):
            count = len(quorum.members)
            continues = "1 node continues" if count == 1 else f"{count} nodes continue"
            event = f"{', '.join(left + joined)}; {continues}, after sync {self.me.progress.syncs}"
            self.history.note(event)
            if self.around.is_first:
                log.warning("%s", event)
        self.history.nodes = len(quorum.members)

    def commit(self, quorum: Quorum) -> None:
        """Update this node's state after a successful vote."""
        self.votes.commit(quorum)
        self.history.admit([each.replica_id for each in quorum.joining], [each.replica_id for each in quorum.members])
        self.shards.commit(quorum)
        self.rendezvous.commit(quorum)
        self.healing.commit(quorum.recovering_from(self.me.replica_id))

    def give_state(self, state: Callable[[], dict[str, Any] | None]) -> None:
        """Send ``state()`` to nodes that wait for this one; None declines. Collective over the node."""
        progress = tuple(self.me.progress)  # `weights_only` loading refuses the class
        about = {"progress": progress, "shards": self.shards.state(), "history": self.history.common()}
        self.healing.send(self.me, state, about)

    def adopt(self, state: dict[str, Any], source: Request) -> None:
        """Continue with the progress in a member's state."""
        if self.around.is_first:
            log.warning("node %s receives the state of node %s", self.me.node, source.node)
        about = state["node"]
        self.shards.load(*about["shards"])
        vars(self.history).update(about["history"])
        self.rendezvous.me = replace(self.me, progress=Progress(*about["progress"]))

    def leave(self, at_once: bool = False, is_over: bool = True) -> None:
        """Leave the run, unless ``at_once`` after others have read this node's votes and states."""
        around = self.around
        if is_over:
            self.rendezvous.finish()
        if around.lighthouse is not None:
            around.lighthouse.leave()
        if not at_once and around.is_first:
            self.healing.decline(self.me)
            self.healing.finish()
            self.votes.finish()
        around.transport.finish()
        around.topology.disconnect()
        around.store = None  # the last reference keeps it open
