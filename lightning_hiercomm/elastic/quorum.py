"""Computes which nodes take part in a synchronization: all nodes get the same result from the requests of all."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

RESTART_EXIT_CODE = 75
"""Exit code of a node without which the others synchronized: its supervisor restarts it, and it recovers."""

FINISHED_EXIT_CODE = 69
"""Exit code of a node whose run has finished: its supervisor need not start it again."""

SIGTERM_EXIT_CODE = 143
"""Exit code of a node that left on SIGTERM; 0 means that the run has finished."""

FINISHED = "at the end"
MUST_NOT_BEGIN = -1


class NodeRefused(RuntimeError):
    """This node cannot take part in the run, for the reason in its message."""


class StaleReplica(SystemExit):
    """The others synchronized without this node, which ends, is restarted, and recovers."""

    def __init__(self, code: int = RESTART_EXIT_CODE, why: str = "the other nodes synchronized without it") -> None:
        super().__init__(code)
        self.why = why  # no argument of the base class, whose only one is the exit code

    def __str__(self) -> str:
        return f"{self.why}; start it again after exit code {RESTART_EXIT_CODE}"


class RunFinished(SystemExit):
    """The run has finished without this node, which need not be started again."""

    def __init__(self, code: int = FINISHED_EXIT_CODE) -> None:
        super().__init__(code)

    def __str__(self) -> str:
        return f"this run has finished, and no other node is left; do not restart after exit code {FINISHED_EXIT_CODE}"


class Progress(NamedTuple):
    """What a node has synchronized.

    Attributes:
        fit: The id of the fit whose state it has; empty without state.
        syncs: How many synchronizations its state includes.
        last_quorum: The token of the last of them.
    """

    fit: str = ""
    syncs: int = 0
    last_quorum: str = ""


_WITHOUT_STATE = Progress()


@dataclass(frozen=True)
class Request:
    """A node's request for a quorum, sent as JSON.

    Attributes:
        node: Its name. A node that starts with the name of another replaces it.
        replica_id: Identifies one incarnation of the node; later ones are greater.
        run: The run's name and fingerprint.
        ranks: Its number of ranks.
        store: ``"host:port"`` of its store, which other nodes read.
        begins_at: Optimizer steps of the checkpoint that it has loaded; ``MUST_NOT_BEGIN`` if it has loaded none, and
            the run has begun before: it was restarted, or has seen members with state.
        progress: What it has synchronized.
        position: Its steps, and how many elements it trains; ``FINISHED`` if the fit has ended on this node.
        number: Counts the requests of this replica.
        admits: Whether nodes can join after this synchronization.
        group: The quorum whose members it is connected to; empty if it is not connected.
        finished_at: After how many synchronizations the fit has ended on a known node; -1 if on none.
    """

    node: str
    replica_id: str
    run: str
    ranks: int
    store: str
    begins_at: int = 0
    progress: Progress = _WITHOUT_STATE
    position: str = ""
    number: int = 0
    admits: bool = False
    group: str = ""
    finished_at: int = -1

    @property
    def has_state(self) -> bool:
        """Whether it has the run's state; otherwise it is joining."""
        return bool(self.progress.fit)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "progress": [*self.progress]}

    @classmethod
    def from_json(cls, value: Any) -> Request | None:
        """Undo :meth:`to_json`; None if another program sent the value."""
        try:
            request = cls(**{each.name: value[each.name] for each in fields(cls) if each.name in value})
            request = replace(request, progress=Progress(*request.progress))
        except TypeError:
            return None
        return request if request._types() == cls("", "", "", 0, "")._types() else None

    def _types(self) -> list[type]:
        return [type(value) for value in (*vars(self).values(), *self.progress)]


@dataclass(frozen=True)
class Quorum:
    """The nodes of one synchronization.

    Attributes:
        members: Those that take part, in their order.
        joining: Those that get the state from a member afterwards: node ``i`` from member ``i`` modulo their number.
        begins: Whether the fit begins with it.
        waits: Why this node has to ask again; empty if it takes part.
        ends_by: By what this node ends if it waits for long, because lost nodes would have to return.
    """

    members: tuple[Request, ...] = ()
    joining: tuple[Request, ...] = ()
    begins: bool = False
    waits: str = ""
    ends_by: BaseException | None = None

    @property
    def token(self) -> str:
        """A unique name of this quorum."""
        return _digest([(member.replica_id, member.number) for member in self.members])

    @property
    def fit(self) -> str:
        return self.members[0].replica_id if self.begins else self.members[0].progress.fit

    @property
    def group(self) -> str:
        """A name of the process groups that were connected in it."""
        return f"{self.token}/{self._ids}"

    @property
    def is_connected(self) -> bool:
        """Whether all members are still connected to each other, and to no other node."""
        groups = {member.group for member in self.members}
        return len(groups) == 1 and groups.pop().partition("/")[2] == self._ids

    @property
    def _ids(self) -> str:
        return _digest([member.replica_id for member in self.members])

    @property
    def nodes(self) -> dict[str, str]:
        """The names of members and joining nodes, by replica id."""
        return {each.replica_id: each.node for each in (*self.members, *self.joining)}

    def index(self, replica_id: str) -> int | None:
        """Return the index of a replica among the members, or None."""
        return next((index for index, member in enumerate(self.members) if member.replica_id == replica_id), None)

    def source_of(self, replica_id: str) -> Request:
        """Return the member from which a joining replica gets its state."""
        return self.members[[each.replica_id for each in self.joining].index(replica_id) % len(self.members)]

    def recovering_from(self, replica_id: str) -> list[Request]:
        """Return the joining nodes that get their state from this member."""
        index = self.index(replica_id)
        return [] if index is None else [*self.joining[index :: len(self.members)]]


def compute_quorum(requests: Sequence[Request], replica_id: str, min_nodes: int = 1) -> Quorum:
    """Compute the quorum of a replica from the requests of all; every node computes the same one.

    Args:
        requests: Those of all nodes, from the lighthouse.
        replica_id: This node's.
        min_nodes: With fewer nodes all wait.

    Raises:
        NodeRefused: If the lighthouse serves another run, another node has replaced this one, or this node is at
            another position than most.
        StaleReplica: If the others have synchronized without this node.
        RunFinished: If they have finished without it.
    """
    me = next(request for request in requests if request.replica_id == replica_id)
    run = min(requests, key=lambda request: (not request.has_state, request.replica_id)).run
    if me.run != run:
        other = next(request for request in requests if request.run == run)
        raise NodeRefused(
            f"node {me.node!r} belongs to run {me.run!r}, but the lighthouse serves {run!r} (node {other.node!r}):"
            " start a lighthouse of its own for each run, with the same model and scheme on all nodes"
        )
    latest: dict[str, Request] = {}
    for request in sorted((each for each in requests if each.run == run), key=lambda each: each.replica_id):
        latest[request.node] = request
    if latest[me.node].replica_id != replica_id:
        raise NodeRefused(
            f"node {me.node!r} was started again, which replaces this incarnation. If two nodes share a machine, give"
            " each its own HIERCOMM_NODE."
        )
    present = sorted((each for each in latest.values() if each.position != FINISHED), key=in_order)
    joining = [request for request in present if not request.has_state]
    with_state = [request for request in present if request.has_state]
    if not with_state:
        return _begin(joining, min_nodes)
    if me.has_state and _ended_at(latest.values(), me.progress.fit) > me.progress.syncs:
        raise RunFinished
    syncs = max(member.progress.syncs for member in with_state)
    members = _with_one_history([member for member in with_state if member.progress.syncs == syncs])
    if me.has_state and me not in members:
        raise StaleReplica
    position = _majority_position(members)
    if me in members and me.position != position:
        positions = "; ".join(f"node {member.node!r} {member.position}" for member in members)
        raise NodeRefused(
            f"nodes came to synchronization {syncs + 1} at different positions: {positions}. All nodes must take"
            " equally many steps, and validate and save after the same ones: give all nodes dataloaders of one length"
            f" (or limit_train_batches), and let none stop on its own. Nodes {position} continue without this one."
        )
    members = [member for member in members if member.position == position]
    if len(members) + len(joining) < min_nodes:
        few = f"{len(members) + len(joining)} of at least {min_nodes} nodes are there"
        is_over = _ended_at(latest.values(), members[0].progress.fit) >= syncs
        return Quorum(waits=few, ends_by=RunFinished() if is_over else None)
    admit = all(member.admits for member in members)
    if not me.has_state and not admit:
        return Quorum(waits="nodes can join only later")
    return Quorum(tuple(members), tuple(joining) if admit else ())


def _with_one_history(members: Sequence[Request]) -> list[Request]:
    """Keep the majority with the same last synchronization.

    A node that was stopped while the others could not read the vote in its store may have counted one on its own.
    """
    counts = Counter(member.progress.last_quorum for member in members)
    kept = max(counts, key=lambda last: (counts[last], last))
    return [member for member in members if member.progress.last_quorum == kept]


def _majority_position(members: Sequence[Request]) -> str:
    oldest_first = sorted(members, key=lambda member: member.replica_id)
    return Counter(member.position for member in oldest_first).most_common(1)[0][0]


def _ended_at(requests: Iterable[Request], fit: str) -> int:
    """Return after how many synchronizations a fit has ended on a node that these know; -1 if on none."""
    return max((request.finished_at for request in requests if request.progress.fit == fit), default=-1)


def _begin(joining: Sequence[Request], min_nodes: int) -> Quorum:
    """Begin a fit from the newest checkpoint that a node has loaded, because no node has the run's state."""
    if len(joining) < min_nodes:
        return Quorum(waits=f"{len(joining)} of at least {min_nodes} nodes are there")
    step = max(request.begins_at for request in joining)
    if step < 0:
        reason = (
            "this run has trained or finished, and no node is left that has its state: it would begin at step 0"
            " again. Give fit(ckpt_path='last') and a ModelCheckpoint whose folder outlives the nodes; or start a new"
            " run, instead of restarting a node"
        )
        return Quorum(waits=reason, ends_by=NodeRefused(reason))
    members = [request for request in joining if max(0, request.begins_at) == step]
    recovering = [request for request in joining if request not in members]
    return Quorum(tuple(members), tuple(recovering), begins=True)


def in_order(member: Request) -> tuple[list[tuple[int, int, str]], str]:
    """Return a sort key by name, with numbers in names compared by value."""
    parts = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", member.node) if part]
    return parts, member.replica_id


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=10).hexdigest()


def random_index(replica_id: str) -> int:
    """Return a pseudorandom number that all nodes compute alike for a replica."""
    return int(_digest(replica_id), 16)
