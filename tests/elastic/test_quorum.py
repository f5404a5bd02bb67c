"""Every node decides by itself who meets, from what all have said: the same everywhere."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace

import pytest

from lightning_hiercomm.elastic.quorum import (
    BEGUN,
    OVER,
    TRAINED,
    DataPartition,
    Member,
    NodeRefused,
    Quorum,
    StaleReplica,
    compute_quorum,
    partition_for_epoch,
    partition_within_epoch,
)


def node(name: str, agreement: int = -1, **said) -> Member:
    said = {"replica_id": f"life-{name}", "position": f"after {agreement}", "ranks": 1, "admits": True, **said}
    return Member(name, run=said.pop("run", "run"), store=f"{name}:1", syncs=agreement, **said)


def meet(*present: Member, who: Member | None = None, **limits) -> Quorum:
    """What one of them decides; if all are in it, they come to the same."""
    if who is None:
        quorums = {member.replica_id: compute_quorum(present, member.replica_id, **limits) for member in present}
        assert len({repr(quorum) for quorum in quorums.values()}) == 1
        return quorums[present[0].replica_id]
    return compute_quorum(present, who.replica_id, **limits)


def test_what_a_node_says_goes_through_json_and_what_a_newer_version_adds_is_left_out():
    said = node("a", 3, shards=(1, 2), requests=7)
    assert Member.from_json({**json.loads(json.dumps(said.to_json())), "new": 1}) == said


def test_a_run_begins_with_all_that_are_there_in_the_order_of_their_names():
    ten, two = node("host10"), node("host2")
    quorum = meet(ten, two)
    assert quorum.members == (two, ten)
    assert quorum.begins
    assert not quorum.joining


def test_it_goes_on_from_the_newest_checkpoint_and_who_has_an_older_one_is_healed():
    old, new, none = node("a", checkpoint_step=100), node("b", checkpoint_step=300), node("c")
    quorum = meet(old, new, none)
    assert quorum.members == (new,)
    assert quorum.joining == (old, none)
    assert quorum.source_of(none.replica_id) == new


def test_a_run_begins_with_those_that_reach_each_other():
    a, b, c = node("a"), node("b", unreachable=("life-a",)), node("c", unreachable=("life-a",))
    assert meet(a, b, c, who=b) == meet(a, b, c, who=c) == Quorum((b, c), begins=True)
    assert meet(a, b, c, who=a).waits == "it and node b, c do not reach each other"
    assert meet(a, b, who=a) == Quorum((a,), begins=True)
    assert meet(a, b, who=b).waits == "it and node a do not reach each other"
    assert meet(a, b, who=a, min_nodes=2).waits == "1 of at least 2 nodes are there"


def test_a_run_that_the_lighthouse_saw_train_does_not_begin_once_more_in_silence():
    lost, fresh = node("a", is_lost=True), node("b", is_lost=True)
    quorum = meet(lost, fresh)
    assert quorum.is_hopeless
    assert "step 0 once more. Give fit" in quorum.waits
    assert meet(replace(lost, restarts=1, is_lost=False), node("b", restarts=3, is_lost=False)).begins, (
        "none has trained"
    )
    assert meet(lost, node("b", is_lost=True, checkpoint_step=50)).begins, "from a checkpoint"
    assert meet(lost, node("b", 5), who=lost).joining == (lost,), "somebody has its state"


def test_where_the_lighthouse_does_not_say_nodes_that_were_all_started_again_do_not_begin():
    again = [node("a", restarts=1), node("b", restarts=2)]
    assert meet(*again).is_hopeless
    assert meet(again[0], node("c")).begins
    assert meet(again[0], node("b", restarts=1, checkpoint_step=50)).begins


def test_a_node_that_is_started_again_when_the_run_is_over_says_so():
    late = node("a", restarts=1, is_lost=False, is_over=True)
    quorum = meet(late)
    assert (quorum.is_hopeless, quorum.is_over) == (True, True)
    assert quorum.waits == "this run is over: nobody is there to give a node its state"
    assert meet(replace(late, restarts=0)).begins, "the next fit of one program"


def test_what_the_lighthouse_remembers_tells_whether_a_run_has_trained_and_is_over():
    first, second, other = node("a", fit="1"), node("a", fit="2"), node("a", run="other", fit="3")
    new = node("x")
    read = lambda *notes: (new.reads(notes).is_lost, new.reads(notes).is_over)  # noqa: E731
    assert read() == read(other.note(TRAINED)) == (False, False)
    assert read(first.note(TRAINED)) == (True, False)
    assert read(first.note(TRAINED), first.note(OVER)) == (False, True)
    assert read(first.note(TRAINED), first.note(OVER), second.note(TRAINED)) == (True, True)
    assert read(first.note(BEGUN), first.note(OVER)) == (False, True)
    assert read(first.note(OVER), second.note(BEGUN)) == (False, False)


def test_who_has_ended_further_on_than_a_node_has_outrun_it():
    def at(agreement, fit="x"):
        return node("a", agreement, fit=fit)

    assert at(3).has_been_outrun([at(2).note_of_end(), at(4).note_of_end()])
    assert not at(4).has_been_outrun([at(4).note_of_end(), at(9, "y").note_of_end()])
    assert not at(4).has_been_outrun([f"{at(4).note_of_end()}-of-a-stranger", at(5).note(OVER)])


def test_who_committed_another_agreement_of_that_number_is_left_behind():
    """It kept the vote and was stopped: the others could not read it, and have agreed without it meanwhile."""
    alone = node("a", 5, last_quorum="kept by a")
    others = [node("b", 5, last_quorum="without a"), node("c", 5, last_quorum="without a")]
    with pytest.raises(StaleReplica):
        meet(alone, *others, who=alone)
    assert meet(alone, *others, who=others[0]).members == tuple(others)


@pytest.mark.parametrize(
    ("missed", "left"),
    [
        ({}, "abcd"),
        ({"b": "c"}, "abd"),  # of two that miss each other, the later one
        ({"a": "d", "b": "d"}, "abc"),
        ({"d": "abc", "a": "d"}, "abc"),
        ({"a": "bcd"}, "bcd"),
        ({"a": "bcd", "b": "acd", "c": "abd", "d": "abc"}, "a"),
        ({"a": "x"}, "abcd"),  # which is not there
    ],
    ids=str,
)
def test_nodes_that_do_not_reach_each_other_do_not_meet_and_the_most_of_those_that_do_go_on(missed, left):
    members = [node(name, 5, unreachable=tuple(f"life-{each}" for each in missed.get(name, ""))) for name in "abcd"]
    for member in members:
        quorum = meet(*members, who=member)
        if member.node in left:
            assert [each.node for each in quorum.members] == [*left]
        else:
            assert "do not reach each other" in quorum.waits


def test_a_newcomer_that_does_not_reach_a_member_is_not_admitted_to_disturb_the_others():
    members, new, other = [node("a", 5), node("b", 5)], node("x", unreachable=("life-b", "life-gone")), node("y")
    assert meet(*members, new, other, who=members[0]).joining == (other,)
    assert meet(*members, new, other, who=new).waits == "it and node b do not reach each other"
    assert meet(members[0], new, other).joining == (new, other)


def test_newcomers_get_their_state_from_the_members_in_turn():
    members, new = [node("a", 5), node("b", 5)], [node("x"), node("y"), node("z")]
    quorum = meet(*new, *members)
    assert quorum.members == tuple(members)
    assert [quorum.source_of(each.replica_id) for each in new] == [members[0], members[1], members[0]]
    assert quorum.recovering_from(members[0].replica_id) == [new[0], new[2]]
    assert quorum.recovering_from(members[1].replica_id) == [new[1]]
    assert quorum.source_of(members[0].replica_id) is None


def test_newcomers_wait_where_nodes_are_not_equal_afterwards_and_where_all_places_are_taken():
    members, new = [node("a", 5, admits=False), node("b", 5, admits=False)], node("x")
    assert "equal only later" in meet(*members, new, who=new).waits
    assert meet(*members, new, who=members[0]) == Quorum(tuple(members))
    members = [node("a", 5), node("b", 5)]
    assert "all 2 places" in meet(*members, new, who=new, max_nodes=2).waits
    assert meet(*members, new, who=members[0], max_nodes=2).joining == ()
    first, second = node("x"), node("y")
    assert meet(*members, first, second, who=first, max_nodes=3).joining == (first,)
    assert "places" in meet(*members, first, second, who=second, max_nodes=3).waits


def test_with_too_few_nodes_all_wait_and_newcomers_count():
    members = [node("a", 5)]
    assert "1 of at least 2" in meet(*members, who=members[0], min_nodes=2).waits
    assert meet(*members, node("x"), min_nodes=2).members == tuple(members)
    assert "1 of at least 2" in meet(node("x"), who=node("x"), min_nodes=2).waits


def test_a_node_that_missed_an_agreement_is_left_behind_and_the_others_go_on():
    late, other, third = node("a", 4), node("b", 5), node("c", 5)
    with pytest.raises(StaleReplica) as ended:
        meet(late, other, third, who=late)
    assert ended.value.code == 75
    told = pickle.loads(pickle.dumps(ended.value))  # as the first rank of a node tells the others
    assert (type(told), told.code, str(told)) == (StaleReplica, 75, str(ended.value))
    assert meet(late, other, third, who=other).members == (other, third)


@pytest.mark.parametrize(
    ("steps", "left"),
    [([50, 40, 50], [0, 2]), ([57, 100, 100, 100], [1, 2, 3]), ([50, 40], [0]), ([40, 50, 50, 40], [0, 3])],
    ids=str,
)
def test_a_node_that_is_at_another_place_than_most_ends_and_says_where_all_are(steps, left):
    """Of as many, those go on of which one lives longest."""
    members = [node(name, 5, position=f"after {at} optimizer steps") for name, at in zip("abcd", steps, strict=False)]
    for index, member in enumerate(members):
        if index in left:
            assert meet(*members, who=member) == Quorum(tuple(members[each] for each in left))
        else:
            with pytest.raises(NodeRefused, match=f"node 'a' after {steps[0]} optimizer steps; node 'b' after"):
                meet(*members, who=member)
    new = node("x")
    assert meet(*members, new, who=new).members == tuple(members[each] for each in left)


def test_a_later_life_of_a_node_takes_the_place_of_the_one_before():
    old, new, other = node("a", 5, replica_id="1"), node("a", replica_id="2"), node("b", 5, replica_id="0")
    with pytest.raises(NodeRefused, match="'a' was started once more"):
        meet(old, new, other, who=old)
    quorum = meet(old, new, other, who=other)
    assert quorum.members == (other,)
    assert quorum.joining == (new,)


def test_a_node_of_another_run_is_refused_and_does_not_disturb():
    members, stranger = [node("a", 5), node("b", 5)], node("x", run="another")
    with pytest.raises(NodeRefused, match="belongs to run 'another', but the lighthouse serves 'run'"):
        meet(*members, stranger, who=stranger)
    assert meet(*members, stranger, who=members[0]) == Quorum(tuple(members))
    early = node("0", replica_id="0", run="first")
    assert meet(early, stranger, who=early).members == (early,)


def test_groups_are_used_again_by_exactly_those_that_were_connected():
    begun = meet(node("a"), node("b"), node("c"))
    assert not begun.is_connected
    known = [replace(member, syncs=0, groups=begun.groups, requests=1) for member in begun.members]
    assert meet(*known).is_connected
    assert meet(*known, node("x")).is_connected
    assert not meet(*known[:2]).is_connected
    assert not meet(known[0], known[1], replace(known[2], groups="")).is_connected
    assert not meet(known[0], known[1], replace(known[2], replica_id="other")).is_connected


def test_every_meeting_has_a_name_of_its_own():
    a, b = node("a", 1), node("b", 1)
    asked = [
        meet(replace(a, requests=i), replace(b, requests=j)).token for i, j in itertools.product(range(3), range(3))
    ]
    assert len(set(asked)) == 9


def begun_with(*members: Member) -> list[Member]:
    """The members of a run that has begun with these."""
    quorum = meet(*members)
    partition = partition_within_epoch(quorum)
    return [
        replace(member, syncs=3, position="", num_shards=partition.total, shards=partition.shards[member.replica_id])
        for member in quorum.members
    ]


def test_inside_an_epoch_shares_of_the_data_stay_and_a_newcomer_takes_those_that_were_lost():
    a, b, c = begun_with(node("a", ranks=2), node("b"), node("c", ranks=2))
    assert [each.shards for each in (a, b, c)] == [(0, 1), (2,), (3, 4)]
    new = node("x", ranks=2)
    partition = partition_within_epoch(meet(a, c, new))
    assert partition.total == 5
    assert partition.shards[new.replica_id][0] == 2
    assert partition.shards[new.replica_id][1] in range(5)
    assert (partition.shards[a.replica_id], partition.shards[c.replica_id]) == ((0, 1), (3, 4))
    first, second = node("x"), node("y")
    both = partition_within_epoch(meet(a, c, first, second))
    assert both.shards[first.replica_id] == (2,)
    assert len(both.shards[second.replica_id]) == 1


def test_an_epoch_begins_with_a_share_for_every_rank_that_is_there_and_those_of_a_node_that_came_again_are_the_same():
    members = begun_with(node("a", ranks=2), node("b"), node("c"))
    a, b, c = members
    assert partition_for_epoch(meet(a, c)).shards == {a.replica_id: (0, 1), c.replica_id: (2,)}
    again = node("b", replica_id="b's next")
    partition = partition_for_epoch(meet(a, c, again))
    assert (partition.total, partition.shards[again.replica_id]) == (4, b.shards)
    more = partition_for_epoch(meet(a, b, c, node("d", ranks=3)))
    assert more.total == 7
    assert sorted(shard for shards in more.shards.values() for shard in shards) == [*range(7)]


def test_shares_that_nobody_took_are_counted():
    partition = partition_within_epoch(meet(node("a", ranks=2), node("b"), node("c", ranks=2)))
    assert partition.lost(["life-a", "life-b", "life-c"]) == 0
    assert partition.lost(["life-b", "life-x"]) == 4
    assert DataPartition.from_plain(json.loads(json.dumps(partition.to_plain()))) == partition
