"""Who takes part in an agreement: the same answer on every node, from what all of them said when they asked."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

NO_STATE = -1
"""The agreement of a node that has no state yet."""

BEGUN, TRAINED, OVER, ENDED = "fit", "trained", "over", "ended"
"""What the lighthouse remembers of a run."""

RESTART_EXIT_CODE = 75
"""Of a node that was left behind: whoever watches over it starts it again, and it heals."""

FINISHED_EXIT_CODE = 69
"""Of a node that was started again when the run was over: whoever watches over it need not start it any more."""

SIGTERM_EXIT_CODE = 143
"""Of a node that left on SIGTERM, as of any process that it ends: not that of a run that has come to its end."""


class NodeRefused(RuntimeError):
    """This node cannot take part, and says why."""


class StaleReplica(SystemExit):
    """The others agreed without this node: it ends, is started again, and heals."""

    def __init__(self, code: int = RESTART_EXIT_CODE) -> None:  # of one argument: ranks tell each other
        super().__init__(code)

    def __str__(self) -> str:
        return f"the others have agreed without it; with exit code {RESTART_EXIT_CODE}, it is to be started again"


class RunFinished(SystemExit):
    """The others have come to the run's end, and are gone: nobody has to start this node again."""

    def __init__(self, code: int = FINISHED_EXIT_CODE) -> None:
        super().__init__(code)

    def __str__(self) -> str:
        return f"this run is over, and nobody else is there; exit code {FINISHED_EXIT_CODE}: do not start it again"


@dataclass(frozen=True)
class Member:
    """What a node says of itself when it asks who is there. All of it is small, and goes through JSON.

    Attributes:
        node: Its name. Whoever comes under the name of another takes its place.
        replica_id: Tells the lives of a node apart; that of a later one is greater.
        run: Of which run it is.
        ranks: How many it has.
        store: The address where others find what it has to say.
        requests: How often it has asked in this life.
        syncs: How many agreements its parameters have seen; ``NEWCOMER`` if it has none that count.
        position: Where in the training it is.
        checkpoint_step: Of a newcomer, the optimizer steps of the checkpoint that it was given.
        restarts: How often whoever watches over it has started it again; 0 if it has come to the end of a run since.
        groups: Which groups of nodes it is still connected to.
        admits: Whether all nodes will be equal after this agreement, so that others can join.
        shards: Which shares of the data its ranks take.
        num_shards: How many shares the data are cut into; 0 where nobody has said so yet.
        fit: The meeting with which its run began.
        last_quorum: That of the last agreement that its parameters have seen.
        unreachable: The lives of nodes that did not answer it when it tried to connect last.
        is_lost: Of a newcomer, whether the lighthouse knows that this run has trained and is not over; None if it does
            not say.
        is_over: Of a newcomer, whether the lighthouse knows that this run has come to its end, and of no later fit.
        has_seen_it: Of a newcomer, whether it has asked while nodes that have the run's state did.
    """

    node: str
    replica_id: str
    run: str
    ranks: int
    store: str
    requests: int = 0
    syncs: int = NO_STATE
    position: str = ""
    checkpoint_step: int = 0
    restarts: int = 0
    groups: str = ""
    admits: bool = False
    shards: tuple[int, ...] = ()
    num_shards: int = 0
    fit: str = ""
    last_quorum: str = ""
    unreachable: tuple[str, ...] = ()
    is_lost: bool | None = None
    is_over: bool = False
    has_seen_it: bool = False

    @property
    def is_joining(self) -> bool:
        """Whether it has no state that counts."""
        return self.syncs == NO_STATE

    @property
    def is_late(self) -> bool:
        """Whether a run that is over may be the one that it comes to; otherwise it may be about to begin another."""
        return self.restarts > 0 or self.has_seen_it

    def note(self, what: str) -> str:
        """What the lighthouse is to remember of this run, such as that it has ``"trained"``."""
        return f"{what}-{_digest(self.run)}-{self.fit}"

    def reads(self, notes: Collection[str]) -> Member:
        """A newcomer that knows what the lighthouse remembers."""
        begun, trained, over = (self.noted(what, notes) for what in (BEGUN, TRAINED, OVER))
        return replace(self, is_lost=bool(trained - over), is_over=bool(over) and begun <= over)

    def noted(self, what: str, notes: Collection[str]) -> set[str]:
        """What follows this node's own note at the lighthouse; of a newcomer, with which meetings those fits began."""
        own = self.note(what)
        return {note.removeprefix(own) for note in notes if note.startswith(own)}

    def note_of_end(self) -> str:
        """What the lighthouse is to remember of this node when it has come to the end: after how many agreements."""
        return f"{self.note(ENDED)}-{self.syncs}"

    def has_been_outrun(self, notes: Collection[str]) -> bool:
        """Whether others have come to this run's end by agreements that this node knows nothing of."""
        ends = [end.removeprefix("-") for end in self.noted(ENDED, notes)]
        return any(end.isdigit() and int(end) > self.syncs for end in ends)

    def to_json(self) -> dict[str, Any]:
        """Primitives only."""
        return {**asdict(self), "shards": list(self.shards), "unreachable": list(self.unreachable)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Member | None:
        """Undo :meth:`to_json`; what a newer version says besides is left out. None of what no node says."""
        known = {each.name for each in fields(cls)}
        own = {name: each for name, each in value.items() if name in known}
        try:
            return cls(**{**own, **{name: tuple(own.get(name, ())) for name in ("shards", "unreachable")}})
        except TypeError:
            return None


@dataclass(frozen=True)
class Quorum:
    """Who meets for one agreement.

    Attributes:
        members: Who takes part, in their order.
        joining: Who gets its state from a member after it; newcomer ``i`` from member ``i``, modulo their number.
        begins: Whether the run begins with it.
        waits: Why this node has to ask again; empty if it has not.
        is_hopeless: Whether it waits in vain, unless somebody comes who is only silent.
        is_over: Whether that is because the run has come to its end.
    """

    members: tuple[Member, ...] = ()
    joining: tuple[Member, ...] = ()
    begins: bool = False
    waits: str = ""
    is_hopeless: bool = False
    is_over: bool = False

    @property
    def token(self) -> str:
        """Names this meeting, also among those of the same members."""
        return _digest([(member.replica_id, member.requests) for member in self.members])

    @property
    def groups(self) -> str:
        """Names the groups that are connected in it."""
        return f"{self.token}/{_members_digest(self.members)}"

    @property
    def is_connected(self) -> bool:
        """Whether all members are still connected to each other, and to nobody else."""
        known = {member.groups for member in self.members}
        return len(known) == 1 and known.pop().partition("/")[2] == _members_digest(self.members)

    def index(self, replica_id: str) -> int | None:
        """The place of a life among the members."""
        return next((index for index, member in enumerate(self.members) if member.replica_id == replica_id), None)

    def source_of(self, replica_id: str) -> Member | None:
        """The member that gives a newcomer its state; None for others."""
        replica_ids = [member.replica_id for member in self.joining]
        return self.members[replica_ids.index(replica_id) % len(self.members)] if replica_id in replica_ids else None

    def recovering_from(self, replica_id: str) -> list[Member]:
        """The newcomers that a member gives its state to."""
        sources = {member.replica_id: self.source_of(member.replica_id) for member in self.joining}
        return [
            each
            for each in self.joining
            if (source := sources[each.replica_id]) is not None and source.replica_id == replica_id
        ]


def compute_quorum(
    present: Sequence[Member], replica_id: str, min_nodes: int = 1, max_nodes: int | None = None
) -> Quorum:
    """Who meets, from what all who ask have said; every one of them comes to the same answer by itself.

    Args:
        present: What the lighthouse has told all of them.
        replica_id: Of the node that wants to know.
        min_nodes: Without so many nobody meets.
        max_nodes: More do not take part.

    Raises:
        NotInThisRun: If the lighthouse serves another run, another node has taken this one's name, or this node is not
            where most others are.
        LeftBehind: If the others have agreed without this node.
    """
    me = next(member for member in present if member.replica_id == replica_id)
    run = min(present, key=lambda member: (member.is_joining, member.replica_id)).run
    if me.run != run:
        other = next(member for member in present if member.run == run)
        raise NodeRefused(
            f"node {me.node!r} belongs to run {me.run!r}, but the lighthouse serves {run!r} (node {other.node!r}):"
            " start a lighthouse of its own for each run, with the same model and scheme on all nodes"
        )
    newest: dict[str, Member] = {}
    for member in sorted((m for m in present if m.run == run), key=lambda m: m.replica_id):
        newest[member.node] = member
    if newest[me.node].replica_id != replica_id:
        raise NodeRefused(
            f"node {me.node!r} was started once more, and this life of it is over. Tell nodes that share a machine"
            " apart by the environment variable HIERCOMM_NODE."
        )
    everyone = sorted(newest.values(), key=_in_order)
    alive = [member for member in everyone if not member.is_joining]
    new = [member for member in everyone if member.is_joining]
    if not alive:
        return _beginning(new, me, min_nodes, max_nodes)
    latest = max(member.syncs for member in alive)
    up_to_date = _of_one_history([member for member in alive if member.syncs == latest])
    if not me.is_joining and me not in up_to_date:
        raise StaleReplica
    members = _who_reach_each_other(up_to_date)
    apart = _apart(me, members)
    if apart and me not in members:
        return Quorum(waits=apart)
    position = _where_most_are(members)
    if me in members and me.position != position:
        places = "; ".join(f"node {member.node!r} {member.position}" for member in members)
        raise NodeRefused(
            f"nodes came to agreement {latest + 1} at different places: {places}. All nodes must take equally many"
            " steps, validate and save after the same ones: give all nodes dataloaders of one length (or"
            f" limit_train_batches), and let none stop by itself. Those that are {position} go on without this one."
        )
    members = [member for member in members if member.position == position]
    replica_ids = {member.replica_id for member in members}
    if len(members) + len(new) < min_nodes:
        return Quorum(waits=f"{len(members) + len(new)} of at least {min_nodes} nodes are there")
    room = len(new) if max_nodes is None else max(0, max_nodes - len(members))
    reaching = [each for each in new if not replica_ids.intersection(each.unreachable)]
    admitted = reaching[:room] if all(member.admits for member in members) else []
    if me.is_joining and me not in admitted:
        full = room < len(new)
        return Quorum(waits=f"all {max_nodes} places are taken" if full else "nodes are equal only later")
    return Quorum(tuple(members), tuple(admitted))


def _of_one_history(members: Sequence[Member]) -> list[Member]:
    """Those whose last agreement was the same one.

    A node that is stopped when the others cannot read the vote it keeps may have one for itself, under their number.
    """
    of_each = Counter(member.last_quorum for member in members)
    kept = max(of_each, key=lambda last: (of_each[last], last))
    return [member for member in members if member.last_quorum == kept]


def _where_most_are(members: Sequence[Member]) -> str:
    """The place of most of them; of as many, that of the one which lives longest."""
    of_each = Counter(member.position for member in members)
    return max(
        sorted(members, key=lambda member: member.replica_id), key=lambda member: of_each[member.position]
    ).position


def _who_reach_each_other(members: Sequence[Member]) -> list[Member]:
    """Without those that miss most others, or are missed by them; of two, without the later one."""
    left = list(members)
    while True:
        replica_ids = {member.replica_id for member in left}
        apart = {
            frozenset((member.replica_id, replica_id))
            for member in left
            for replica_id in member.unreachable
            if replica_id in replica_ids
        }
        if not apart:
            return left
        misses = Counter(replica_id for pair in apart for replica_id in pair)
        left.remove(max(reversed(left), key=lambda member: misses[member.replica_id]))


def _beginning(new: Sequence[Member], me: Member, min_nodes: int, max_nodes: int | None) -> Quorum:
    """Nobody has state: the run begins, or goes on from the newest checkpoint that any node was given."""
    is_over = any(member.is_over for member in new) and not any(
        member.checkpoint_step or member.is_lost for member in new
    )
    if is_over and all(member.is_late for member in new):
        return Quorum(
            is_hopeless=True, is_over=True, waits="this run is over: nobody is there to give a node its state"
        )
    everyone, new = new, _who_reach_each_other(new)
    if me not in new:
        return Quorum(waits=_apart(me, everyone))
    if len(new) < min_nodes:
        return Quorum(waits=f"{len(new)} of at least {min_nodes} nodes are there")
    origin = max(member.checkpoint_step for member in new)
    all_again, knows = all(member.restarts for member in new), any(member.is_lost is not None for member in new)
    if origin == 0 and (any(member.is_lost for member in new) or (all_again and not knows)):
        return Quorum(
            is_hopeless=True,
            waits="this run has trained, and no node that is there has its state: it would begin at step 0 once more."
            " Give fit(ckpt_path='last') and a ModelCheckpoint whose folder outlives the nodes; or start a new run,"
            " with another HIERCOMM_RUN or a new lighthouse",
        )
    members = [member for member in new if member.checkpoint_step == origin][:max_nodes]
    others = [member for member in new if member not in members]
    joining = others if max_nodes is None else others[: max_nodes - len(members)]
    if me not in members and me not in joining:
        return Quorum(waits=f"all {max_nodes} places are taken")
    return Quorum(tuple(members), tuple(joining), begins=True)


@dataclass(frozen=True)
class DataPartition:
    """Who takes which shares of the data.

    Attributes:
        total: Into how many they are cut.
        shards: By life.
    """

    total: int = 0
    shards: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def lost(self, replica_ids: Collection[str]) -> int:
        """How many shares none of these takes."""
        return self.total - len({shard for replica_id in replica_ids for shard in self.shards.get(replica_id, ())})

    def to_plain(self) -> list[Any]:
        """Primitives only."""
        return [self.total, {replica_id: list(shards) for replica_id, shards in self.shards.items()}]

    @classmethod
    def from_plain(cls, value: Sequence[Any]) -> DataPartition:
        """Undo :meth:`to_plain`."""
        return cls(value[0], {replica_id: tuple(shards) for replica_id, shards in value[1].items()})


def partition_for_epoch(quorum: Quorum) -> DataPartition:
    """A share for every rank of all who are there, in the order of the nodes' names: for an epoch that begins."""
    shards: dict[str, tuple[int, ...]] = {}
    total = 0
    for each in sorted((*quorum.members, *quorum.joining), key=_in_order):
        shards[each.replica_id] = tuple(range(total, total + each.ranks))
        total += each.ranks
    return DataPartition(total, shards)


def partition_within_epoch(quorum: Quorum) -> DataPartition:
    """What members have, and newcomers take of what was lost: inside an epoch, whose length stays.

    When there are no lost shares left, a newcomer takes shares that others take as well, until the epoch ends. A run
    begins with a share for every rank of its first members.
    """
    if quorum.begins:
        first = partition_for_epoch(replace(quorum, joining=()))
        total, given = first.total, dict(first.shards)
    else:
        total = quorum.members[0].num_shards
        given = {each.replica_id: each.shards for each in quorum.members}
    used = {shard for shards in given.values() for shard in shards}
    lost = [shard for shard in range(total) if shard not in used]
    for joining_node in quorum.joining:
        any_share, its_ranks = int(_digest(joining_node.replica_id), 16), range(joining_node.ranks)
        given[joining_node.replica_id] = tuple(
            lost.pop(0) if lost else (any_share + rank) % total for rank in its_ranks
        )
    return DataPartition(total, given)


def _apart(me: Member, members: Iterable[Member]) -> str:
    """Which of these this one does not reach, or which do not reach it; empty if there are none."""
    others = _names(
        member for member in members if member.replica_id in me.unreachable or me.replica_id in member.unreachable
    )
    return others and f"it and node {others} do not reach each other"


def _names(members: Iterable[Member]) -> str:
    return ", ".join(member.node for member in members)


def _in_order(member: Member) -> tuple[list[tuple[int, int, str]], str]:
    """By name, numbers in it by their size."""
    words = [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", member.node) if word]
    return words, member.replica_id


def _members_digest(members: Sequence[Member]) -> str:
    return _digest([member.replica_id for member in members])


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=10).hexdigest()
