"""Which nodes are there: one node asks the lighthouse by its first rank, and all its ranks learn the same."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lightning_hiercomm.elastic.configuration import Elastic
from lightning_hiercomm.elastic.groups import Transport
from lightning_hiercomm.elastic.healing import Healing
from lightning_hiercomm.elastic.lighthouse import Lighthouse
from lightning_hiercomm.elastic.quorum import (
    BEGUN,
    NO_STATE,
    OVER,
    TRAINED,
    DataPartition,
    Member,
    NodeRefused,
    Quorum,
    RunFinished,
    StaleReplica,
    compute_quorum,
    partition_for_epoch,
    partition_within_epoch,
)
from lightning_hiercomm.elastic.signature import Signer
from lightning_hiercomm.elastic.topology import ElasticTopology

log = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE = 1.0
_SAY_AFTER = 10.0
_HOPE = 3  # times the silence after which a node counts as gone: perhaps all the others have only been slow
_SOME = 8  # nodes that are asked for what any of them knows
_COMMIT, _AGAIN = b"commit", b"again"
_ended_here: set[str] = set()  # with which meetings those runs began whose end this process has seen
_GLANCE = 0.1  # seconds for what is only said, so that nobody has to wait for it
_SAY_FAILED = 10  # times that an agreement of the same nodes fails: so often in a row nodes are seldom lost, or slow
_GIVE_UP = 30


@dataclass
class ElasticHistory:
    """What a person may watch of it; a healed node goes on with the others' own, but for its seconds.

    Attributes:
        nodes: How many took part in the last agreement.
        heals: How many nodes were healed since the run began.
        lost_seconds: How long this node waited for nodes that were gone, and for agreements made once more.
        lost_batches: Batches, of one rank each, from which the agreed model has learned nothing: those of nodes that
            were gone before they agreed, and those that nobody has taken while a share of the data had no node.
        let_in: Lives that were let in, and have not agreed with the others yet: they may have to ask again.
        events: Who came and went, in words; the last hundred.
    """

    nodes: int = 0
    heals: int = 0
    lost_seconds: float = 0.0
    lost_batches: int = 0
    let_in: frozenset[str] = frozenset()
    events: list[str] = field(default_factory=list)

    def scalars(self) -> dict[str, float]:
        """For loggers."""
        counted = {name: float(getattr(self, name)) for name in ("nodes", "heals", "lost_seconds", "lost_batches")}
        return {"nodes": counted.pop("nodes"), **counted}

    def let(self, joining: Collection[str], members: Collection[str]) -> None:
        """These lives get their state after an agreement of those; one whose state does not arrive comes once more."""
        self.heals += len(set(joining) - self.let_in)
        self.let_in = self.let_in.union(joining).difference(members)

    def note(self, event: str) -> None:
        """Something has happened now."""
        self.events = [*self.events[-99:], f"{time.strftime('%H:%M:%S')} {event}"]

    def lines(self) -> list[str]:
        """The run's history, for people."""
        counted = (
            f"nodes that came and went: {self.heals} healed; waited {self.lost_seconds:.1f} s for those that were gone;"
            f" {self.lost_batches} batches were lost with them"
        )
        return [counted, *(f"  {event}" for event in self.events)]

    def common(self) -> dict[str, Any]:
        """What is the same on all nodes."""
        common = {name: getattr(self, name) for name in ("heals", "lost_batches", "events")}
        return {**common, "let_in": sorted(self.let_in)}

    def take(self, common: Mapping[str, Any]) -> None:
        """Go on from what another node has said by :meth:`common`."""
        vars(self).update({**common, "let_in": frozenset(common["let_in"])})


def has_ended_here() -> bool:
    """Whether this process has come to the end of a run."""
    return bool(_ended_here)


class Membership:
    """This node among the others, seen from one of its ranks. All methods are collective over the node.

    Args:
        me: What the node says of itself at first; the same on all its ranks, but for ``life``, which rank 0 gives.
        elastic: As the user configured it.
        topology: Formed anew by :meth:`meet`.
        lighthouse: On the node's first rank.
        transport: To other nodes.
        store: On the node's first rank, its own.
        before_change: Called before the topology holds other nodes, perhaps more than once; what it returned last,
            after that.
        signer: Of the run's token.
        told_to_leave: Asked while the node waits for others: what ends training on a rank that is to leave, or None.
        device: On which the node's ranks talk to each other. Default: the CPU.
    """

    def __init__(
        self,
        me: Member,
        elastic: Elastic,
        topology: ElasticTopology,
        lighthouse: Lighthouse | None,
        transport: Transport,
        store: Store | None,
        before_change: Callable[[], Callable[[], None]],
        signer: Signer | None = None,
        told_to_leave: Callable[[], BaseException | None] = lambda: None,
        device: torch.device | None = None,
    ) -> None:
        self._signer = signer or Signer()
        self._told_to_leave = told_to_leave
        self._intra = topology.intra
        self._topology = topology
        self._elastic = elastic
        self._lighthouse = lighthouse
        self._transport = transport
        self._before_change = before_change
        own = replace(me, replica_id=f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}") if self.is_first else me
        self.me: Member = self._share(own)
        self.healing = Healing(self._intra, transport, store, elastic.dead_after, self._signer, device)
        self.history = ElasticHistory()
        self._store = store
        self._known: dict[str, str] = {}
        self._last: Quorum | None = None
        self._members: Sequence[Member] = ()  # of whom some did not answer when this node had to reach them
        self._failures: tuple[frozenset[str], int] = frozenset(), 0  # since the last agreement: of whom, in a row
        self._votes: list[Quorum] = []  # that this node's store keeps
        self._batches = 0
        self._partition = self._next_partition = DataPartition()
        self._trained: list[tuple[DataPartition, int]] = []
        self._is_noted = False
        self._over: set[str] = set()  # with which meetings those fits of this run began that are
        self._others_at = NO_STATE  # the newest agreement that others are known to have come to
        if lighthouse is not None:
            lighthouse.when_back(self._look_whether_others_agreed)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for its node."""
        return self._intra.rank == 0

    @property
    def leads(self) -> bool:
        """Whether this node is the first of those that met last: the one that writes what all have in common."""
        return self._last is None or self._last.index(self.me.replica_id) == 0

    @property
    def partition(self) -> DataPartition:
        """Who takes which shares of the data at this moment."""
        return self._partition

    # ---- meeting -------------------------------------------------------------------------------------------------

    def form_quorum(self, position: str, admits: bool = False) -> Quorum:
        """Wait for all others that are alive, and connect to them.

        Args:
            position: Where in the training this node is; must be that of the others.
            admits: Whether newcomers may get their state after this agreement.

        Raises:
            NotInThisRun: If this node cannot take part.
            LeftBehind: If the others have agreed without it.
            RunIsOver: If they have come to its end.
            BaseException: What says that a rank of this node is told to leave, while it waits.
        """
        began, said = time.monotonic(), ""
        hopeless_since: float | None = None
        self.healing.send_away_expected()
        while True:
            if self.me.is_joining or (said and self._members):  # perhaps they answer by now
                self._miss(self._members)
            self.me = replace(self.me, requests=self.me.requests + 1, position=position, admits=admits)
            self.healing.note_asking(self.me)
            quorum = self._ask(began)
            if quorum.waits:
                hopeless_since = (hopeless_since or time.monotonic()) if quorum.is_hopeless else None
                if hopeless_since and self._share(time.monotonic() - hopeless_since) > _HOPE * self._elastic.dead_after:
                    self._end(RunFinished() if quorum.is_over else NodeRefused(quorum.waits))
                if said != quorum.waits and self.is_first:
                    log.warning("node %s waits: %s", self.me.node, quorum.waits)
                said = quorum.waits
                time.sleep(0.05)
                continue
            if self._begins_from_another(quorum) or self._connect(quorum):
                if quorum.begins and self._over - _ended_here and quorum.index(self.me.replica_id) == 0:
                    log.warning(
                        "node %s begins at step 0: the lighthouse knows that a run of this name has come to its end."
                        " To go on with that, give fit(ckpt_path='last'); to tell runs apart, set HIERCOMM_RUN",
                        self.me.node,
                    )
                self._note_who_is_there(quorum)
                self._last = quorum
                return quorum
            self.healing.send_away(
                quorum.recovering_from(self.me.replica_id)
            )  # or they wait for this node, and it for them

    def _begins_from_another(self, quorum: Quorum) -> bool:
        """Whether this node gets its state from a member; not if it would miss another one at the next agreement."""
        if quorum.source_of(self.me.replica_id) is None:
            return False
        self._miss(quorum.members)
        self._members = quorum.members if self.me.unreachable else ()
        return not self.me.unreachable

    def _ask(self, began: float) -> Quorum:
        while True:
            answer: Any = None
            if self.is_first:
                assert self._lighthouse is not None
                try:
                    if self.is_behind:
                        raise StaleReplica
                    present = self._lighthouse.ask(self.me.replica_id, self._says(), _PATIENCE)
                    if present is not None:
                        said = [each for each in present if isinstance(each, Mapping) and "replica_id" in each]
                        answer = self._decided(said)
                        if self._misses_somebody(answer) and self.me.has_been_outrun(self._lighthouse.notes() or ()):
                            raise RunFinished  # this node stood still meanwhile
                    is_alone = present is None or (len(present) == 1 and answer.waits)
                    has_hoped = time.monotonic() - began > _HOPE * self._elastic.dead_after
                    if is_alone and has_hoped and self._comes_too_late():
                        raise RunFinished
                except (NodeRefused, SystemExit) as refusal:
                    answer = refusal
            found = self._intra.all_gather_object((answer, self._told_to_leave()))
            answer = found[0][0]
            if isinstance(answer, BaseException):
                self._end(answer)
            leaving = next((why for _, why in found if why is not None), None)
            if leaving is not None and (answer is None or answer.waits):  # nobody counts on it yet
                raise leaving
            if answer is not None:
                quorum: Quorum = answer
                return quorum
            if self.is_first and 0 < time.monotonic() - began - _SAY_AFTER < _PATIENCE:
                log.warning("node %s waits for other nodes", self.me.node)

    @property
    def is_behind(self) -> bool:
        """Whether the others are known to have agreed without this node. For its first rank, outside of agreements."""
        return not self.me.is_joining and self._others_at > self.me.syncs

    def end_if_behind(self) -> None:
        """Between two agreements: what this node trains from now on would be lost."""
        if self.is_first and self.is_behind:
            self._end(StaleReplica())

    def _look_whether_others_agreed(self) -> bool | None:
        """On the lighthouse's thread, when this node was not heard for long; None if nobody says so."""
        me, quorum = self.me, self._last
        if quorum is None or me.is_joining:
            return None
        others = [member.store for member in quorum.members if member.replica_id != me.replica_id][:_SOME]
        said = [text.decode().split() for text in self._transport.glance(others, self._signer.key("syncs")) if text]
        at = [int(agreement) for begun, agreement in said if begun == me.fit]
        self._others_at = max([self._others_at, *at])
        return self.is_behind if at else None

    def _end(self, why: BaseException) -> NoReturn:
        if self.is_first:
            log.warning("node %s ends: %s", self.me.node, why)
        raise why

    def _decided(self, present: Sequence[Mapping[str, Any]]) -> Quorum:
        known = [each for each in present if self._signer.verifies(each)]
        members = [member for each in known if (member := Member.from_json(dict(each))) is not None]
        if self.me.is_joining and any(member.run == self.me.run and not member.is_joining for member in members):
            self.me = replace(self.me, has_seen_it=True)
        if len(known) < len(present) and self.me.is_joining and all(member.is_joining for member in members):
            strangers = [each.get("node") for each in present if each not in known]
            return Quorum(waits=f"nodes {strangers} have another HIERCOMM_TOKEN, or none")
        return compute_quorum(members, self.me.replica_id, self._elastic.min_nodes, self._elastic.max_nodes)

    def _says(self) -> dict[str, Any]:
        return self._signer.signed(self._with_notes().to_json())

    def _with_notes(self) -> Member:
        """This node, which if it is new knows what the lighthouse remembers."""
        if not self.me.is_joining or self.me.checkpoint_step:
            return self.me
        assert self._lighthouse is not None
        notes = self._lighthouse.notes()
        self._over = self.me.noted(OVER, notes or ())
        return self.me if notes is None else self.me.reads(notes)

    def _comes_too_late(self) -> bool:
        me = self._with_notes()
        if me.is_joining:
            return me.is_late and me.is_over and not me.is_lost
        # a node that has come to the end by itself, as a callback may have it, says that the run is over, too
        assert self._lighthouse is not None
        return bool(me.noted(OVER, self._lighthouse.notes() or ())) and not self._others_answer()

    def _misses_somebody(self, quorum: Quorum) -> bool:
        """Of those that it met last."""
        last = () if self._last is None or self.me.is_joining or quorum.waits else self._last.members
        return not {member.replica_id for member in last} <= {member.replica_id for member in quorum.members}

    def _others_answer(self) -> bool:
        members = () if self._last is None else self._last.members
        others = [member.store for member in members if member.replica_id != self.me.replica_id]
        return len(self._transport.unreachable(others)) < len(others)

    def _connect(self, quorum: Quorum) -> bool:
        """Connect to all members, unless that is done; whether all ranks of this node are."""
        index = quorum.index(self.me.replica_id)
        if index is None:
            return False
        if quorum.is_connected:
            return True
        topology, local, error = self._topology, self._topology.local_rank, ""
        topology.disconnect()
        go_on = self._before_change()  # nothing of what is under way may come between what new connections carry
        topology.breaker.reset()
        has_lane = len(quorum.members) > 1 and local < min(member.ranks for member in quorum.members)
        try:
            for number, lane in enumerate(topology.all_groups):
                name = f"{local}.{number}"
                lane.connect(self._transport.connect_group(quorum, index, name, topology.meter) if has_lane else None)
        except RuntimeError as raised:
            error = str(raised).splitlines()[0]
        failures = [each for each in self._intra.all_gather_object(error) if each]
        if failures:
            if self.is_first:
                names = ", ".join(member.node for member in quorum.members)
                log.info("node %s cannot connect to nodes %s: %s", self.me.node, names, failures[0])
            topology.disconnect()
            self.me = replace(self.me, groups="")
            self._miss(quorum.members)
            self._members = quorum.members if self.me.unreachable else ()
            self.note_failure(quorum, failures[0])
            return False
        topology.reform([member.ranks for member in quorum.members], index)
        go_on()
        self.me, self._members = replace(self.me, groups=quorum.groups, unreachable=()), ()
        return True

    def note_failure(self, quorum: Quorum, why: str) -> None:
        """Nothing has come of a meeting, and it was taken back.

        If that happens to the same nodes again and again, though all of them are there, no try will help: the one that
        came last ends, and the others go on. If it was another's fault they fail again, down to the first of them.

        Args:
            quorum: Of this node, and others.
            why: Of what is known here.

        Raises:
            NotInThisRun: If this node has to end.
        """
        replica_ids = frozenset(member.replica_id for member in quorum.members)
        before, times = self._failures
        times = times + 1 if replica_ids == before else 1
        self._failures = replica_ids, times
        if times % _SAY_FAILED == 0 and self.is_first:
            log.warning(
                "node %s: the exchange of one agreement has failed %d times (%s), and is made once more",
                self.me.node,
                times,
                why,
            )
        if times >= _GIVE_UP and self.me.replica_id == max(replica_ids):
            others = ", ".join(member.node for member in quorum.members if member.replica_id != self.me.replica_id)
            self._end(
                NodeRefused(
                    f"its agreement with nodes {others} has failed {times} times ({why}). Nodes have to reach each"
                    " other at all ports, at the address that HIERCOMM_ADDRESS names; and where 4 MiB take longer than"
                    f" dead_after={self._elastic.dead_after:g} s, give Elastic and the lighthouse a larger dead_after."
                    " Those that came before this node go on without it"
                )
            )

    def note_connections(self) -> None:
        """Something has gone wrong between two agreements: this node has to be connected anew. Collective over it."""
        if len(self._topology.all_groups) > 1 and any(
            self._intra.all_gather_object(not self._topology.breaker.is_intact)
        ):
            self._topology.disconnect()
            self.me = replace(self.me, groups="")

    def _miss(self, members: Sequence[Member]) -> None:
        """Remember who of these does not answer."""
        missed: tuple[str, ...] = ()
        if self.is_first and members:
            others = {member.store: member.replica_id for member in members if member.replica_id != self.me.replica_id}
            missed = tuple(others[address] for address in self._transport.unreachable([*others]))
        self.me = replace(self.me, unreachable=self._share(missed))

    def _note_who_is_there(self, quorum: Quorum) -> None:
        """One line when a node comes or goes."""
        now = {member.replica_id: member.node for member in (*quorum.members, *quorum.joining)}
        if self._known:
            gone = [node for replica_id, node in self._known.items() if replica_id not in now]
            come = [node for replica_id, node in now.items() if replica_id not in self._known]
            said = [f"node {node} is gone" for node in gone] + [f"node {node} has come" for node in come]
            if said:
                others = f"{len(quorum.members)} go on, after agreement {self.me.syncs}"
                self.history.note(f"{', '.join(said)}; {others}")
                if self.is_first:
                    log.warning("%s; %s", ", ".join(said), others)
        self._known = now
        self.history.nodes = len(quorum.members)

    # ---- the vote ------------------------------------------------------------------------------------------------

    def vote(self, quorum: Quorum, well: bool) -> bool:
        """Whether all members have all of it: the same answer everywhere, unless the store is lost that keeps it.

        A member that did not hear of it rolls back, and is left behind.

        Args:
            quorum: Of the agreement.
            well: Whether this node has all of it; the same on its ranks.
        """
        decision = self._share(self._decide(quorum, well) if self.is_first else None)
        if not decision:
            self._topology.disconnect()  # who still waits for this node learns at once
            self.me = replace(self.me, groups="")
            self.healing.send_away(quorum.recovering_from(self.me.replica_id))
        return bool(decision)

    def _decide(self, quorum: Quorum, well: bool) -> bool:
        if len(quorum.members) == 1:
            return well
        dead_after, first = self._elastic.dead_after, quorum.members[0].store
        if quorum.index(self.me.replica_id) == 0:
            self._votes.append(quorum)

        def refuse(whole: Store) -> None:
            self._votes_in(whole, quorum).compare_set("decision", "", _AGAIN.decode())

        def decide(whole: Store) -> bool:
            store = self._votes_in(whole, quorum)
            if store.add("well", 1) == len(quorum.members):
                store.compare_set("decision", "", _COMMIT.decode())
            try:
                store.wait(["decision"], timedelta(seconds=dead_after))
            except RuntimeError:  # somebody died before it voted: whoever finds that out first decides for all
                store.compare_set("decision", "", _AGAIN.decode())
            agreed = store.get("decision") == _COMMIT
            store.add("read", 1)
            return agreed

        if not well:  # the answer is known, and the one that is gone may be the one that keeps the vote
            with contextlib.suppress(RuntimeError):
                self._transport.ask(first, refuse, _GLANCE)
            return False
        try:
            return self._transport.ask(first, decide, dead_after + 0.5)
        except RuntimeError as error:
            log.info("node %s cannot read the vote: %s", self.me.node, str(error).splitlines()[0])
            return False

    def _votes_in(self, store: Store, quorum: Quorum) -> Store:
        return PrefixStore(self._signer.key(f"{quorum.token}/vote"), store)

    def _forget_votes(self, quorum: Quorum) -> None:
        """Who is in this meeting has read those before, and who is not is left behind whatever it reads."""
        if self._store is not None:
            for votes in (self._votes_in(self._store, each) for each in self._votes if each is not quorum):
                for key in ("well", "decision", "read"):
                    votes.delete_key(key)
        self._votes = [each for each in self._votes if each is quorum]

    def commit(self, quorum: Quorum, batches: int, brings: bool = True) -> None:
        """The agreement holds.

        Args:
            quorum: Of it.
            batches: How many each rank has trained on so far.
            brings: Whether the nodes know of them now.
        """
        self._failures = frozenset(), 0
        self._forget_votes(quorum)
        self._note_batches(batches)
        replica_ids = [member.replica_id for member in quorum.members]
        self.history.let([joining_node.replica_id for joining_node in quorum.joining], replica_ids)
        if brings:
            self.history.lost_batches += sum(
                partition.lost(replica_ids) * trained for partition, trained in self._trained
            )
            self._trained = []
        self._next_partition = partition_for_epoch(quorum)
        self._take(
            partition_within_epoch(quorum),
            syncs=self.me.syncs + 1,
            fit=quorum.token if quorum.begins else self.me.fit,
            last_quorum=quorum.token,
        )
        if self.leads and self._lighthouse is not None:
            if quorum.begins and (
                self._over or self.me.checkpoint_step
            ):  # or who is started again takes it for the one before
                self._lighthouse.take_note(self.me.note(BEGUN))
            if self.me.syncs > 0 and not self._is_noted:
                self._is_noted = self._lighthouse.take_note(self.me.note(TRAINED))
        if self._store is not None:
            self._store.set(self._signer.key("syncs"), f"{self.me.fit} {self.me.syncs}")
        self.healing.forget_given()
        for recovering_node in quorum.recovering_from(self.me.replica_id):
            self.healing.expect(recovering_node)

    def begin_epoch(self, batches: int) -> bool:
        """The data are divided anew, among all who were there at the last agreement; whether this changes anything.

        Args:
            batches: How many each rank has trained on so far.
        """
        before = self.me.shards, self.me.num_shards
        self._note_batches(batches)
        self._take(self._next_partition)
        return before != (self.me.shards, self.me.num_shards)

    def _note_batches(self, batches: int) -> None:
        self._trained.append((self._partition, batches - self._batches))
        self._batches = batches

    def _take(self, partition: DataPartition, **more: Any) -> None:
        self._partition = partition
        self.me = replace(self.me, shards=partition.shards[self.me.replica_id], num_shards=partition.total, **more)

    def heal(self, source: Member) -> dict[str, Any] | None:
        """Get the state of the run from a member; None if it, or its agreement, did not get so far: ask again."""
        state = self.healing.fetch(source, self.me)
        if state is None:
            return None
        about = state["node"]
        self._next_partition, self._batches = DataPartition.from_plain(about["next_partition"]), about["batches"]
        self._take(
            DataPartition.from_plain(about["partition"]),
            **{name: about[name] for name in ("syncs", "fit", "last_quorum")},
        )
        self.history.take(about["history"])
        return state

    def give_state(self, state: Callable[[], dict[str, Any] | None]) -> None:
        """Give newcomers that wait for this node what ``state`` returns; None sends them away, to ask again."""
        about = {
            **{name: getattr(self.me, name) for name in ("syncs", "fit", "last_quorum")},
            "partition": self._partition.to_plain(),
            "next_partition": self._next_partition.to_plain(),
            "batches": self._batches,
            "history": self.history.common(),
        }
        self.healing.give(state, about)

    def leave(self, at_once: bool = False, is_over: bool = True) -> None:
        """This node takes part no longer. Not collective.

        Args:
            at_once: Do not stay for others that still read what this node keeps for them.
            is_over: Whether the run has come to its end.
        """
        if self._lighthouse is not None:
            if is_over and self.me.syncs > 0:
                _ended_here.add(self.me.fit)
                self._lighthouse.take_note(self.me.note(OVER))
                self._lighthouse.take_note(self.me.note_of_end())
            self._lighthouse.leave()
        if not at_once:
            self._linger()
        self._topology.disconnect()
        self._store = None  # it listens as long as anybody holds it
        self.healing.close()

    def _linger(self) -> None:
        """Stay until the others have read what this node's store keeps: the last decision, and states of newcomers."""
        quorum = self._last
        if not self.is_first or self._store is None:
            return
        self.healing.linger()
        if quorum is None or len(quorum.members) == 1 or quorum.index(self.me.replica_id) != 0:
            return
        store = self._votes_in(self._store, quorum)
        deadline = time.monotonic() + self._elastic.dead_after
        with contextlib.suppress(RuntimeError):
            while store.add("read", 0) < len(quorum.members) and time.monotonic() < deadline:
                if store.check(["decision"]) and store.get("decision") == _AGAIN:
                    return
                time.sleep(0.02)

    def _share(self, value: T) -> T:
        """What the first rank of the node has."""
        shared: T = self._intra.all_gather_object(value if self.is_first else None)[0]
        return shared
