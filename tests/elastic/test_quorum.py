"""Every node computes by itself which nodes take part, from the requests of all: the same on every node."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace

import pytest

from lightning_hiercomm.elastic.data_partition import DataPartition, partition_for_epoch, partition_within_epoch
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


def node(name: str, syncs: int = -1, **request) -> Request:
    """A request of a node with state after so many synchronizations; of a joining node if that is negative."""
    defaults = {"replica_id": f"life-{name}", "position": f"after {syncs}", "ranks": 1, "admits": True, "run": "run"}
    progress = Progress("fit", syncs, request.pop("last_quorum", "")) if syncs >= 0 else Progress()
    return Request(name, store=f"{name}:1", **{**defaults, "progress": progress, **request})


def meet(*present: Request, who: Request | None = None, **limits) -> Quorum:
    """Compute the quorum of one node; without ``who``, of all of them, which must be equal."""
    if who is None:
        quorums = {member.replica_id: compute_quorum(present, member.replica_id, **limits) for member in present}
        assert len({repr(quorum) for quorum in quorums.values()}) == 1
        return quorums[present[0].replica_id]
    return compute_quorum(present, who.replica_id, **limits)


def test_request_survives_json_and_ignores_unknown_fields():
    request = node("a", 3, number=7)
    assert Request.from_json({**json.loads(json.dumps(request.to_json())), "new": 1}) == request
    for other in (
        {"node": "a"},
        None,
        "text",
        {**request.to_json(), "progress": [5, 3, ""]},
        {**request.to_json(), "progress": 5},
        {**request.to_json(), "progress": ["fit", 3, "", 1]},
        {**request.to_json(), "admits": 5},
    ):
        assert Request.from_json(other) is None


def test_run_begins_with_all_nodes_in_the_order_of_their_names():
    ten, two = node("host10"), node("host2")
    quorum = meet(ten, two)
    assert quorum.members == (two, ten)
    assert quorum.begins
    assert not quorum.joining


def test_run_begins_from_the_newest_checkpoint_and_other_nodes_recover():
    old, new, none = node("a", begins_at=100), node("b", begins_at=300), node("c")
    quorum = meet(old, new, none)
    assert quorum.members == (new,)
    assert quorum.joining == (old, none)
    assert quorum.source_of(none.replica_id) == new


def test_restarted_nodes_do_not_begin_at_step_0():
    restarted = [node("a", begins_at=MUST_NOT_BEGIN), node("b", begins_at=MUST_NOT_BEGIN)]
    assert isinstance(meet(*restarted).ends_by, NodeRefused)
    assert "step 0 again. Give fit" in meet(*restarted).waits
    begun = meet(restarted[0], node("c"))
    assert begun.begins
    assert len(begun.members) == 2
    assert meet(restarted[0], node("b", begins_at=50)).joining == (restarted[0],)


def test_finished_members_take_no_part():
    members, finished = [node("a", 7), node("b", 7)], node("c", 7, position=FINISHED, finished_at=7)
    assert meet(*members, finished, who=members[0]).members == tuple(members)
    few = meet(members[0], finished, who=members[0], min_nodes=2)
    assert isinstance(few.ends_by, RunFinished)


def test_node_that_others_have_outrun_to_the_end_ends():
    behind, ended = node("a", 3), node("b", 4, position=FINISHED, finished_at=4)
    with pytest.raises(RunFinished):
        meet(behind, ended, who=behind)
    with pytest.raises(RunFinished):
        meet(replace(behind, finished_at=4))
    equal = node("a", 4)
    assert meet(equal, ended, who=equal).members == (equal,)
    assert meet(behind, replace(ended, progress=Progress("another", 4)), who=behind).members == (behind,)


def test_member_with_another_last_quorum_than_most_is_stale():
    """It was stopped with the vote in its store: the others could not read it, and have synchronized without it."""
    alone = node("a", 5, last_quorum="kept by a")
    others = [node("b", 5, last_quorum="without a"), node("c", 5, last_quorum="without a")]
    with pytest.raises(StaleReplica):
        meet(alone, *others, who=alone)
    assert meet(alone, *others, who=others[0]).members == tuple(others)


def test_joining_nodes_recover_from_the_members_in_turn():
    members, new = [node("a", 5), node("b", 5)], [node("x"), node("y"), node("z")]
    quorum = meet(*new, *members)
    assert quorum.members == tuple(members)
    assert [quorum.source_of(each.replica_id) for each in new] == [members[0], members[1], members[0]]
    assert quorum.recovering_from(members[0].replica_id) == [new[0], new[2]]
    assert quorum.recovering_from(members[1].replica_id) == [new[1]]


def test_joining_nodes_wait_for_admission():
    members, new = [node("a", 5, admits=False), node("b", 5, admits=False)], node("x")
    assert "join only later" in meet(*members, new, who=new).waits
    assert meet(*members, new, who=members[0]) == Quorum(tuple(members))


def test_all_wait_for_min_nodes_and_joining_nodes_count():
    members = [node("a", 5)]
    assert "1 of at least 2" in meet(*members, who=members[0], min_nodes=2).waits
    assert meet(*members, node("x"), min_nodes=2).members == tuple(members)
    assert "1 of at least 2" in meet(node("x"), who=node("x"), min_nodes=2).waits


def test_node_that_missed_a_synchronization_is_stale():
    late, other, third = node("a", 4), node("b", 5), node("c", 5)
    with pytest.raises(StaleReplica) as ended:
        meet(late, other, third, who=late)
    assert ended.value.code == 75
    received = pickle.loads(pickle.dumps(ended.value))  # as the first rank of a node sends it to the others
    assert (type(received), received.code, str(received)) == (StaleReplica, 75, str(ended.value))
    assert meet(late, other, third, who=other).members == (other, third)


@pytest.mark.parametrize(
    ("steps", "left"),
    [([50, 40, 50], [0, 2]), ([57, 100, 100, 100], [1, 2, 3]), ([50, 40], [0]), ([40, 50, 50, 40], [0, 3])],
    ids=str,
)
def test_node_at_another_position_than_most_is_refused(steps, left):
    """Ties are broken in favor of the oldest replica."""
    members = [node(name, 5, position=f"after {at} optimizer steps") for name, at in zip("abcd", steps, strict=False)]
    for index, member in enumerate(members):
        if index in left:
            assert meet(*members, who=member) == Quorum(tuple(members[each] for each in left))
        else:
            with pytest.raises(NodeRefused, match=f"node 'a' after {steps[0]} optimizer steps; node 'b' after"):
                meet(*members, who=member)
    new = node("x")
    assert meet(*members, new, who=new).members == tuple(members[each] for each in left)


def test_later_incarnation_of_a_node_replaces_the_earlier_one():
    old, new, other = node("a", 5, replica_id="1"), node("a", replica_id="2"), node("b", 5, replica_id="0")
    with pytest.raises(NodeRefused, match="'a' was started again"):
        meet(old, new, other, who=old)
    quorum = meet(old, new, other, who=other)
    assert quorum.members == (other,)
    assert quorum.joining == (new,)


def test_node_of_another_run_is_refused():
    members, stranger = [node("a", 5), node("b", 5)], node("x", run="another")
    with pytest.raises(NodeRefused, match="belongs to run 'another', but the lighthouse serves 'run'"):
        meet(*members, stranger, who=stranger)
    assert meet(*members, stranger, who=members[0]) == Quorum(tuple(members))
    early = node("0", replica_id="0", run="first")
    assert meet(early, stranger, who=early).members == (early,)


def test_process_groups_are_reused_by_the_same_members_only():
    begun = meet(node("a"), node("b"), node("c"))
    assert not begun.is_connected
    known = [replace(member, progress=Progress("fit"), group=begun.group, number=1) for member in begun.members]
    assert meet(*known).is_connected
    assert meet(*known, node("x")).is_connected
    assert not meet(*known[:2]).is_connected
    assert not meet(known[0], known[1], replace(known[2], group="")).is_connected
    assert not meet(known[0], known[1], replace(known[2], replica_id="other")).is_connected


def test_every_quorum_has_its_own_token():
    a, b = node("a", 1), node("b", 1)
    asked = [meet(replace(a, number=i), replace(b, number=j)).token for i, j in itertools.product(range(3), range(3))]
    assert len(set(asked)) == 9


def begun_with(*members: Request) -> tuple[tuple[Request, ...], DataPartition]:
    """The members of a run that has begun with these, and their partition of the data."""
    quorum = meet(*members)
    partition = partition_within_epoch(quorum, DataPartition())
    return tuple(replace(each, progress=Progress("fit", 3), position="") for each in quorum.members), partition


def test_joining_node_takes_lost_shards_within_an_epoch():
    (a, b, c), begun = begun_with(node("a", ranks=2), node("b"), node("c", ranks=2))
    assert [begun.shards[each.replica_id] for each in (a, b, c)] == [(0, 1), (2,), (3, 4)]
    new = node("x", ranks=2)
    partition = partition_within_epoch(meet(a, c, new), begun)
    assert partition.total == 5
    assert partition.shards[new.replica_id][0] == 2
    assert partition.shards[new.replica_id][1] in range(5)
    assert (partition.shards[a.replica_id], partition.shards[c.replica_id]) == ((0, 1), (3, 4))
    first, second = node("x"), node("y")
    both = partition_within_epoch(meet(a, c, first, second), begun)
    assert both.shards[first.replica_id] == (2,)
    assert len(both.shards[second.replica_id]) == 1


def test_epoch_begins_with_a_shard_for_every_rank():
    (a, b, c), begun = begun_with(node("a", ranks=2), node("b"), node("c"))
    assert partition_for_epoch(meet(a, c)).shards == {a.replica_id: (0, 1), c.replica_id: (2,)}
    again = node("b", replica_id="b's next")
    partition = partition_for_epoch(meet(a, c, again))
    assert (partition.total, partition.shards[again.replica_id]) == (4, begun.shards[b.replica_id])
    more = partition_for_epoch(meet(a, b, c, node("d", ranks=3)))
    assert more.total == 7
    assert sorted(shard for shards in more.shards.values() for shard in shards) == [*range(7)]
