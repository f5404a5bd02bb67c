"""Votes after each exchange, so that all members keep its result or none does."""

from __future__ import annotations

import contextlib
import logging
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from lightning_hiercomm.elastic.quorum import Quorum
from lightning_hiercomm.elastic.surroundings import Surroundings

log = logging.getLogger(__name__)

_COMMIT, _REPEAT = b"commit", b"repeat"
_REFUSAL_TIMEOUT = 0.1  # seconds: a node that refuses knows the result


class Vote:
    """Votes in the store of the quorum's first member."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._kept: list[Quorum] = []  # with votes in this node's store

    def decide(self, quorum: Quorum, replica_id: str, succeeded: bool) -> bool:
        """Return whether all members have succeeded: the same on all members that can read the result.

        A member that cannot read it rolls back, and is stale if the others committed. Collective over the node.
        """
        return self._around.shared(self._around.is_first and self._decide(quorum, replica_id, succeeded))

    def _decide(self, quorum: Quorum, replica_id: str, succeeded: bool) -> bool:
        members = quorum.members
        if len(members) == 1:
            return succeeded
        if quorum.index(replica_id) == 0:
            self._kept.append(quorum)

        def refuse(whole: Store) -> None:
            self._within(whole, quorum).compare_set("decision", "", _REPEAT.decode())

        def decide(whole: Store) -> bool:
            store = self._within(whole, quorum)
            if store.add("succeeded", 1) == len(members):
                store.compare_set("decision", "", _COMMIT.decode())
            try:
                store.wait(["decision"], timedelta(seconds=self._around.elastic.dead_after))
            except RuntimeError:  # a member was lost before it voted
                store.compare_set("decision", "", _REPEAT.decode())
            is_kept = store.get("decision") == _COMMIT
            store.add("read", 1)
            return is_kept

        first = members[0].store
        if not succeeded:
            with contextlib.suppress(RuntimeError):  # the first member may be the lost one
                self._around.transport.ask(first, refuse, _REFUSAL_TIMEOUT)
            return False
        try:
            return self._around.transport.ask(first, decide, self._around.elastic.dead_after + 0.5)
        except RuntimeError as error:
            log.info("cannot read the vote at %s: %s", first, str(error).splitlines()[0])
            return False

    def commit(self, quorum: Quorum) -> None:
        """Delete earlier votes, which the members of this quorum have read."""
        if self._around.store is not None:
            for votes in (self._within(self._around.store, each) for each in self._kept if each is not quorum):
                for key in ("succeeded", "decision", "read"):
                    votes.delete_key(key)
        self._kept = [each for each in self._kept if each is quorum]

    def finish(self) -> None:
        """Wait until all members have read the last result."""
        if self._around.store is None or not self._kept:
            return
        quorum = self._kept[-1]
        store = self._within(self._around.store, quorum)
        deadline = time.monotonic() + self._around.elastic.dead_after
        with contextlib.suppress(RuntimeError):
            while store.add("read", 0) < len(quorum.members) and time.monotonic() < deadline:
                if store.check(["decision"]) and store.get("decision") == _REPEAT:
                    return
                time.sleep(0.02)

    def _within(self, store: Store, quorum: Quorum) -> Store:
        return PrefixStore(f"{quorum.token}/vote", store)
