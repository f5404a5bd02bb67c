"""Nodes, inter-node groups and weights."""

from __future__ import annotations

import pytest
import torch
from harness import on_ranks, place
from hypothesis import given
from hypothesis import strategies as st

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.nodes.topology import Topology, nodes_by_count, nodes_by_place


@st.composite
def some_nodes(draw: st.DrawFn) -> list[list[int]]:
    """Up to seven ranks in any order, cut into nodes."""
    ranks = draw(st.integers(1, 7).flatmap(lambda size: st.permutations(range(size))))
    cuts = sorted(draw(st.sets(st.integers(1, len(ranks) - 1)))) if len(ranks) > 1 else []
    return [list(ranks[start:end]) for start, end in zip([0, *cuts], [*cuts, len(ranks)], strict=True)]


@given(some_nodes())
def test_every_rank_finds_itself_and_its_node(nodes):
    def work(topology):
        rank = topology.rank
        assert nodes[topology.node][topology.local_rank] == rank
        assert topology.ranks_on_node == len(nodes[topology.node])
        assert topology.num_nodes == len(nodes)
        assert topology.world_size == sum(map(len, nodes))
        assert topology.intra.ranks == tuple(nodes[topology.node])
        assert topology.intra.rank == topology.local_rank
        assert topology.world.ranks == tuple(range(topology.world_size))
        return topology.inter

    inters = on_ranks(work, nodes)
    groups = min(map(len, nodes))
    connected = sorted(rank for rank, inter in enumerate(inters) if inter is not None)
    assert connected == sorted(rank for ranks in nodes for rank in ranks[:groups])
    for inter in inters:
        if inter is not None:  # one rank per node, in node order
            assert [next(m for m, ranks in enumerate(nodes) if r in ranks) for r in inter.ranks] == list(
                range(len(nodes))
            )


@given(some_nodes(), st.data())
def test_weights_are_shares_of_the_world_and_of_the_node(nodes, data):
    size = sum(map(len, nodes))
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=size, max_size=size))

    def work(topology):
        assert topology.node_weight == pytest.approx(sum(weights[r] for r in nodes[topology.node]) / sum(weights))
        return topology.rank_weight, topology.weight_in_node, topology.node_weights

    results = on_ranks(work, nodes, weights)
    assert sum(rank_weight for rank_weight, _, _ in results) == pytest.approx(1)
    assert sum(results[0][2]) == pytest.approx(1)
    for ranks in nodes:
        assert sum(results[r][1] for r in ranks) == pytest.approx(1)


@given(some_nodes(), st.integers(0, 5))
def test_own_shards_tile_a_tensor_and_are_gathered(nodes, elements):
    groups = min(map(len, nodes))
    whole = torch.arange(1.0, elements * groups + 1)

    def work(topology):
        flat = torch.zeros_like(whole)
        topology.own_shard(flat).copy_(topology.own_shard(whole))
        assert topology.own_shard(flat).numel() == (elements if topology.inter is not None else 0)
        topology.gather_shards(flat).wait()
        return flat

    for flat in on_ranks(work, nodes):
        assert torch.equal(flat, whole)


@pytest.mark.usefixtures("device")
def test_a_duplicate_has_its_own_communicators():
    def work(topology):
        duplicate = topology.duplicate()
        assert (duplicate.nodes, duplicate.rank, duplicate.weights) == (topology.nodes, topology.rank, topology.weights)
        first, second = torch.ones(1, device=place.device), torch.full((1,), 10.0, device=place.device)
        pair = [(topology, first), (duplicate, second)]
        handles = [t.intra.all_reduce(x) for t, x in (pair if topology.rank % 2 else reversed(pair))]
        for handle in handles:
            handle.wait()
        return first.item(), second.item()

    assert on_ranks(work, [[0, 1], [2, 3]]) == [(2.0, 20.0)] * 4


def test_duplicates_share_the_world_which_is_closed_once():
    def work(topology):
        closed = []
        topology.world.close = lambda: closed.append(topology.rank)
        derived = topology.duplicate(), topology.duplicate()
        assert all(other.world is topology.world for other in derived)
        derived[0].close()
        assert not closed
        topology.close()
        return closed

    assert on_ranks(work, [[0, 1], [2, 3]]) == [[0], [1], [2], [3]]


@given(some_nodes())
def test_nodes_are_found_from_the_host_names_of_ranks(nodes):
    nodes = sorted(nodes, key=min)  # nodes are numbered by their lowest rank
    places = {rank: (f"host-{m}", local_rank) for m, ranks in enumerate(nodes) for local_rank, rank in enumerate(ranks)}
    assert nodes_by_place([places[rank] for rank in range(len(places))]) == nodes


def test_ranks_that_do_not_know_their_local_rank_are_ordered_by_rank():
    assert nodes_by_place([("b", 0), ("a", 0), ("b", 0), ("a", 0)]) == [[0, 2], [1, 3]]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_counts_split_consecutive_ranks(sizes):
    nodes = nodes_by_count(sizes, sum(sizes))
    assert [len(ranks) for ranks in nodes] == sizes
    assert [rank for ranks in nodes for rank in ranks] == list(range(sum(sizes)))


def test_one_count_is_the_size_of_every_node():
    assert nodes_by_count(2, 6) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (4, "ranks_per_node=4 does not divide the world of 6"),
        (0, "ranks_per_node=0 does not divide"),
        ([4, 1], "adds up to 5, but the world has 6"),
        ([6, 0], "one positive size per node"),
    ],
)
def test_counts_that_do_not_fit_the_world_are_refused(counts, message):
    with pytest.raises(ValueError, match=message):
        nodes_by_count(counts, 6)


@pytest.mark.parametrize("nodes", [[[0, 1], [1]], [[0, 2]], [[0], []]])
def test_nodes_must_hold_every_rank_once(nodes):
    with pytest.raises(ValueError, match="once, not"):
        Topology(nodes, 0, lambda groups, level: None, Meter())


def test_the_same_ranks_always_have_bit_equal_weights():
    def work(topology):
        earlier = topology.duplicate()
        topology.set_weights([0.5, 1 / 6, 1 / 6, 1 / 6])  # whose sum is not quite 1
        later = topology.duplicate()
        return [each.weights for each in (topology, earlier, later, later.duplicate())]

    for weights in on_ranks(work):
        assert len(set(weights)) == 1


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0]])
def test_weights_must_be_positive_and_one_per_rank(weights):
    with pytest.raises(ValueError, match="2 positive numbers"):
        on_ranks(lambda topology: topology, [[0], [1]], weights)


@pytest.mark.usefixtures("device")
def test_groups_inside_the_nodes_hold_values_of_their_own():
    nodes = [[0, 1, 2, 3], [4, 5, 6, 7]]
    pairs = {"pair": [[0, 1], [2, 3], [4, 5], [6, 7]]}

    def work(topology):
        topology.divide(pairs)
        assert topology.duplicate().holders["pair"].group is not topology.holders["pair"].group
        flat = torch.arange(4.0, device=place.device) + 10 * topology.rank
        pair, alone = topology.holders["pair"], topology.holders["rank"]
        assert (pair.num_shards, pair.place, pair.size) == (2, topology.rank % 2, 2)
        assert (alone.num_shards, alone.place, alone.size) == (1, 0, 1)
        assert alone.shard(flat).tolist() == flat.tolist()
        alone.gather(flat).wait()
        pair.gather(flat).wait()
        topology.close()
        return flat.tolist()

    results = on_ranks(work, nodes)
    for first in range(0, 8, 2):
        assert results[first] == results[first + 1] == [10 * first, 10 * first + 1, 10 * first + 12, 10 * first + 13]
