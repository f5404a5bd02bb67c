"""Who takes part in an agreement: the same answer on every node, from what all of them said when they asked."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

NEWCOMER = -1
"""The agreement of a node that has no state yet."""

BEGUN, TRAINED, OVER, ENDED = "begun", "trained", "over", "ended"
"""What the lighthouse remembers of a run."""

EXIT_CODE = 75
"""Of a node that was left behind: whoever watches over it starts it again, and it heals."""

OVER_CODE = 69
"""Of a node that was started again when the run was over: whoever watches over it need not start it any more."""

TOLD_TO_LEAVE_CODE = 143
"""Of a node that left on SIGTERM, as of any process that it ends: not that of a run that has come to its end."""


class NotInThisRun(RuntimeError):
    """This node cannot take part, and says why."""


class LeftBehind(SystemExit):
    """The others agreed without this node: it ends, is started again, and heals."""

    def __init__(self, code: int = EXIT_CODE) -> None:  # of one argument: ranks tell each other
        super().__init__(code)

    def __str__(self) -> str:
        return f"the others have agreed without it; with exit code {EXIT_CODE}, it is to be started again"


class RunIsOver(SystemExit):
    """The others have come to the run's end, and are gone: nobody has to start this node again."""

    def __init__(self, code: int = OVER_CODE) -> None:
        super().__init__(code)

    def __str__(self) -> str:
        return f"this run is over, and nobody else is there; exit code {OVER_CODE}: do not start it again"


@dataclass(frozen=True)
class Member:
    """What a node says of itself when it asks who is there. All of it is small, and goes through JSON.

    Attributes:
        node: Its name. Whoever comes under the name of another takes its place.
        life: Tells the lives of a node apart; that of a later one is greater.
        run: Of which run it is.
        ranks: How many it has.
        store: The address where others find what it has to say.
        asks: How often it has asked in this life.
        agreement: How many agreements its parameters have seen; ``NEWCOMER`` if it has none that count.
        place: Where in the training it is.
        origin: Of a newcomer, the optimizer steps of the checkpoint that it was given.
        restarts: How often whoever watches over it has started it again; 0 if it has come to the end of a run since.
        groups: Which groups of nodes it is still connected to.
        admits: Whether all nodes will be equal after this agreement, so that others can join.
        shares: Which shares of the data its ranks take.
        all_shares: How many shares the data are cut into; 0 where nobody has said so yet.
        begun: The meeting with which its run began.
        last: That of the last agreement that its parameters have seen.
        missed: The lives of nodes that did not answer it when it tried to connect last.
        is_lost: Of a newcomer, whether the lighthouse knows that this run has trained and is not over; None if it does
            not say.
        is_over: Of a newcomer, whether the lighthouse knows that this run has come to its end, and of no later fit.
        has_seen_it: Of a newcomer, whether it has asked while nodes that have the run's state did.
    """

    node: str
    life: str
    run: str
    ranks: int
    store: str
    asks: int = 0
    agreement: int = NEWCOMER
    place: str = ""
    origin: int = 0
    restarts: int = 0
    groups: str = ""
    admits: bool = False
    shares: tuple[int, ...] = ()
    all_shares: int = 0
    begun: str = ""
    last: str = ""
    missed: tuple[str, ...] = ()
    is_lost: bool | None = None
    is_over: bool = False
    has_seen_it: bool = False

    @property
    def is_new(self) -> bool:
        """Whether it has no state that counts."""
        return self.agreement == NEWCOMER

    @property
    def is_late(self) -> bool:
        """Whether a run that is over may be the one that it comes to; otherwise it may be about to begin another."""
        return self.restarts > 0 or self.has_seen_it

    def note(self, what: str) -> str:
        """What the lighthouse is to remember of this run, such as that it has ``"trained"``."""
        return f"{what}-{_digest(self.run)}-{self.begun}"

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
        return f"{self.note(ENDED)}-{self.agreement}"

    def has_been_outrun(self, notes: Collection[str]) -> bool:
        """Whether others have come to this run's end by agreements that this node knows nothing of."""
        ends = [end.removeprefix("-") for end in self.noted(ENDED, notes)]
        return any(end.isdigit() and int(end) > self.agreement for end in ends)

    def to_json(self) -> dict[str, Any]:
        """Primitives only."""
        return {**asdict(self), "shares": list(self.shares), "missed": list(self.missed)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Member | None:
        """Undo :meth:`to_json`; what a newer version says besides is left out. None of what no node says."""
        known = {each.name for each in fields(cls)}
        own = {name: each for name, each in value.items() if name in known}
        try:
            return cls(**{**own, **{name: tuple(own.get(name, ())) for name in ("shares", "missed")}})
        except TypeError:
            return None


@dataclass(frozen=True)
class Meeting:
    """Who meets for one agreement.

    Attributes:
        members: Who takes part, in their order.
        newcomers: Who gets its state from a member after it; newcomer ``i`` from member ``i``, modulo their number.
        begins: Whether the run begins with it.
        waits: Why this node has to ask again; empty if it has not.
        is_hopeless: Whether it waits in vain, unless somebody comes who is only silent.
        is_over: Whether that is because the run has come to its end.
    """

    members: tuple[Member, ...] = ()
    newcomers: tuple[Member, ...] = ()
    begins: bool = False
    waits: str = ""
    is_hopeless: bool = False
    is_over: bool = False

    @property
    def token(self) -> str:
        """Names this meeting, also among those of the same members."""
        return _digest([(member.life, member.asks) for member in self.members])

    @property
    def groups(self) -> str:
        """Names the groups that are connected in it."""
        return f"{self.token}/{_lives(self.members)}"

    @property
    def is_connected(self) -> bool:
        """Whether all members are still connected to each other, and to nobody else."""
        known = {member.groups for member in self.members}
        return len(known) == 1 and known.pop().partition("/")[2] == _lives(self.members)

    def index(self, life: str) -> int | None:
        """The place of a life among the members."""
        return next((index for index, member in enumerate(self.members) if member.life == life), None)

    def source_of(self, life: str) -> Member | None:
        """The member that gives a newcomer its state; None for others."""
        lives = [member.life for member in self.newcomers]
        return self.members[lives.index(life) % len(self.members)] if life in lives else None

    def patients_of(self, life: str) -> list[Member]:
        """The newcomers that a member gives its state to."""
        sources = {member.life: self.source_of(member.life) for member in self.newcomers}
        return [each for each in self.newcomers if (source := sources[each.life]) is not None and source.life == life]


def decide(present: Sequence[Member], life: str, min_nodes: int = 1, max_nodes: int | None = None) -> Meeting:
    """Who meets, from what all who ask have said; every one of them comes to the same answer by itself.

    Args:
        present: What the lighthouse has told all of them.
        life: Of the node that wants to know.
        min_nodes: Without so many nobody meets.
        max_nodes: More do not take part.

    Raises:
        NotInThisRun: If the lighthouse serves another run, another node has taken this one's name, or this node is not
            where most others are.
        LeftBehind: If the others have agreed without this node.
    """
    me = next(member for member in present if member.life == life)
    run = min(present, key=lambda member: (member.is_new, member.life)).run
    if me.run != run:
        other = next(member for member in present if member.run == run)
        raise NotInThisRun(
            f"node {me.node!r} belongs to run {me.run!r}, but the lighthouse serves {run!r} (node {other.node!r}):"
            " start a lighthouse of its own for each run, with the same model and scheme on all nodes"
        )
    newest: dict[str, Member] = {}
    for member in sorted((m for m in present if m.run == run), key=lambda m: m.life):
        newest[member.node] = member
    if newest[me.node].life != life:
        raise NotInThisRun(
            f"node {me.node!r} was started once more, and this life of it is over. Tell nodes that share a machine"
            " apart by the environment variable HIERCOMM_NODE."
        )
    everyone = sorted(newest.values(), key=_in_order)
    alive = [member for member in everyone if not member.is_new]
    new = [member for member in everyone if member.is_new]
    if not alive:
        return _beginning(new, me, min_nodes, max_nodes)
    latest = max(member.agreement for member in alive)
    up_to_date = _of_one_history([member for member in alive if member.agreement == latest])
    if not me.is_new and me not in up_to_date:
        raise LeftBehind
    members = _who_reach_each_other(up_to_date)
    apart = _apart(me, members)
    if apart and me not in members:
        return Meeting(waits=apart)
    place = _where_most_are(members)
    if me in members and me.place != place:
        places = "; ".join(f"node {member.node!r} {member.place}" for member in members)
        raise NotInThisRun(
            f"nodes came to agreement {latest + 1} at different places: {places}. All nodes must take equally many"
            " steps, validate and save after the same ones: give all nodes dataloaders of one length (or"
            f" limit_train_batches), and let none stop by itself. Those that are {place} go on without this one."
        )
    members = [member for member in members if member.place == place]
    lives = {member.life for member in members}
    if len(members) + len(new) < min_nodes:
        return Meeting(waits=f"{len(members) + len(new)} of at least {min_nodes} nodes are there")
    room = len(new) if max_nodes is None else max(0, max_nodes - len(members))
    reaching = [each for each in new if not lives.intersection(each.missed)]
    admitted = reaching[:room] if all(member.admits for member in members) else []
    if me.is_new and me not in admitted:
        full = room < len(new)
        return Meeting(waits=f"all {max_nodes} places are taken" if full else "nodes are equal only later")
    return Meeting(tuple(members), tuple(admitted))


def _of_one_history(members: Sequence[Member]) -> list[Member]:
    """Those whose last agreement was the same one.

    A node that is stopped when the others cannot read the vote it keeps may have one for itself, under their number.
    """
    of_each = Counter(member.last for member in members)
    kept = max(of_each, key=lambda last: (of_each[last], last))
    return [member for member in members if member.last == kept]


def _where_most_are(members: Sequence[Member]) -> str:
    """The place of most of them; of as many, that of the one which lives longest."""
    of_each = Counter(member.place for member in members)
    return max(sorted(members, key=lambda member: member.life), key=lambda member: of_each[member.place]).place


def _who_reach_each_other(members: Sequence[Member]) -> list[Member]:
    """Without those that miss most others, or are missed by them; of two, without the later one."""
    left = list(members)
    while True:
        lives = {member.life for member in left}
        apart = {frozenset((member.life, life)) for member in left for life in member.missed if life in lives}
        if not apart:
            return left
        misses = Counter(life for pair in apart for life in pair)
        left.remove(max(reversed(left), key=lambda member: misses[member.life]))


def _beginning(new: Sequence[Member], me: Member, min_nodes: int, max_nodes: int | None) -> Meeting:
    """Nobody has state: the run begins, or goes on from the newest checkpoint that any node was given."""
    is_over = any(member.is_over for member in new) and not any(member.origin or member.is_lost for member in new)
    if is_over and all(member.is_late for member in new):
        return Meeting(
            is_hopeless=True, is_over=True, waits="this run is over: nobody is there to give a node its state"
        )
    everyone, new = new, _who_reach_each_other(new)
    if me not in new:
        return Meeting(waits=_apart(me, everyone))
    if len(new) < min_nodes:
        return Meeting(waits=f"{len(new)} of at least {min_nodes} nodes are there")
    origin = max(member.origin for member in new)
    all_again, knows = all(member.restarts for member in new), any(member.is_lost is not None for member in new)
    if origin == 0 and (any(member.is_lost for member in new) or (all_again and not knows)):
        return Meeting(
            is_hopeless=True,
            waits="this run has trained, and no node that is there has its state: it would begin at step 0 once more."
            " Give fit(ckpt_path='last') and a ModelCheckpoint whose folder outlives the nodes; or start a new run,"
            " with another HIERCOMM_RUN or a new lighthouse",
        )
    members = [member for member in new if member.origin == origin][:max_nodes]
    others = [member for member in new if member not in members]
    newcomers = others if max_nodes is None else others[: max_nodes - len(members)]
    if me not in members and me not in newcomers:
        return Meeting(waits=f"all {max_nodes} places are taken")
    return Meeting(tuple(members), tuple(newcomers), begins=True)


@dataclass(frozen=True)
class Draw:
    """Who takes which shares of the data.

    Attributes:
        total: Into how many they are cut.
        shares: By life.
    """

    total: int = 0
    shares: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def lost(self, lives: Collection[str]) -> int:
        """How many shares none of these takes."""
        return self.total - len({share for life in lives for share in self.shares.get(life, ())})

    def to_plain(self) -> list[Any]:
        """Primitives only."""
        return [self.total, {life: list(shares) for life, shares in self.shares.items()}]

    @classmethod
    def from_plain(cls, value: Sequence[Any]) -> Draw:
        """Undo :meth:`to_plain`."""
        return cls(value[0], {life: tuple(shares) for life, shares in value[1].items()})


def drawn(meeting: Meeting) -> Draw:
    """A share for every rank of all who are there, in the order of the nodes' names: for an epoch that begins."""
    shares: dict[str, tuple[int, ...]] = {}
    total = 0
    for each in sorted((*meeting.members, *meeting.newcomers), key=_in_order):
        shares[each.life] = tuple(range(total, total + each.ranks))
        total += each.ranks
    return Draw(total, shares)


def inherited(meeting: Meeting) -> Draw:
    """What members have, and newcomers take of what was lost: inside an epoch, whose length stays.

    When there are no lost shares left, a newcomer takes shares that others take as well, until the epoch ends. A run
    begins with a share for every rank of its first members.
    """
    if meeting.begins:
        first = drawn(replace(meeting, newcomers=()))
        total, given = first.total, dict(first.shares)
    else:
        total = meeting.members[0].all_shares
        given = {each.life: each.shares for each in meeting.members}
    used = {share for shares in given.values() for share in shares}
    lost = [share for share in range(total) if share not in used]
    for newcomer in meeting.newcomers:
        any_share, its_ranks = int(_digest(newcomer.life), 16), range(newcomer.ranks)
        given[newcomer.life] = tuple(lost.pop(0) if lost else (any_share + rank) % total for rank in its_ranks)
    return Draw(total, given)


def _apart(me: Member, members: Iterable[Member]) -> str:
    """Which of these this one does not reach, or which do not reach it; empty if there are none."""
    others = _names(member for member in members if member.life in me.missed or me.life in member.missed)
    return others and f"it and node {others} do not reach each other"


def _names(members: Iterable[Member]) -> str:
    return ", ".join(member.node for member in members)


def _in_order(member: Member) -> tuple[list[tuple[int, int, str]], str]:
    """By name, numbers in it by their size."""
    words = [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in re.split(r"(\d+)", member.node) if word]
    return words, member.life


def _lives(members: Sequence[Member]) -> str:
    return _digest([member.life for member in members])


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=10).hexdigest()
