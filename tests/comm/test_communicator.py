"""All communicators behave the same over every backend. A test with a ``rank`` runs on each of four ranks."""

from __future__ import annotations

import inspect

import pytest
import torch

from lightning_hiercomm.comm.base import Together

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8]
SIZES = [1, 3, 7, 1000, 4099]
INTER_NODE = ((0, 2), (1, 3))
by_backend_and_type = pytest.mark.pairwise(groups=[("world", "dtype")])


@pytest.mark.pairwise(groups=[("world", "dtype", "op"), ("world", "dtype", "groups"), ("op", "groups")])
@pytest.mark.parametrize("groups", [((0, 1, 2, 3),), INTER_NODE], ids=["four", "two"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_an_all_reduce_gives_every_rank_the_sum_or_the_maximum(rank, dtype, op, groups):
    group = rank.group(groups)
    for numel in [*SIZES, *[2**20 + 1] * (dtype == torch.float32)]:
        tensor, scalar = rank.values(rank.rank, numel, dtype), torch.tensor(rank.rank, dtype=dtype)
        first, second = group.all_reduce(tensor, op), group.all_reduce(scalar, op)
        first.wait()
        first.wait()  # a second time changes nothing
        second.wait()
        everyones = torch.stack([rank.values(r, numel, torch.float64) for r in group.ranks])
        expected = everyones.sum(0) if op == "sum" else everyones.amax(0)
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected.to(dtype)), numel
        assert scalar.shape == ()
        assert scalar.item() == (sum(group.ranks) if op == "sum" else max(group.ranks))


@by_backend_and_type
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_ranks_that_wait_in_order_reduce_the_same(rank, dtype, op):
    group, peer = rank.group(), rank.rank ^ 1
    tensors = [rank.values(rank.rank, numel, dtype) for numel in SIZES]
    received = torch.zeros(3)
    first = [group.all_reduce(tensor, op, waiting=True) for tensor in tensors[:2]]
    exchanged = group.exchange([(torch.full((3,), float(rank.rank)), peer)], [(received, peer)])
    others = [group.all_reduce(tensor, op, waiting=True) for tensor in tensors[2:]]
    Together([*first, *others]).wait()
    exchanged.wait()
    assert received.tolist() == [peer] * 3
    for handle, tensor, numel in zip([*first, *others], tensors, SIZES, strict=True):
        handle.wait()
        assert handle.is_done()
        everyones = torch.stack([rank.values(r, numel, torch.float64) for r in range(rank.size)])
        assert torch.equal(tensor, (everyones.sum(0) if op == "sum" else everyones.amax(0)).to(dtype)), numel


@by_backend_and_type
@pytest.mark.parametrize("groups", [((0, 1, 2, 3),), INTER_NODE], ids=["four", "two"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_members_contribute_by_their_weights(rank, dtype, groups):
    group = rank.group(groups)
    for numel in [1, 4099]:
        tensor = rank.values(rank.rank, numel, dtype)
        group.all_reduce(tensor, weight=0.5 * (rank.rank + 1)).wait()
        total = sum(0.5 * (r + 1) * rank.values(r, numel, torch.float64) for r in group.ranks)
        assert torch.equal(tensor, total.to(dtype))
    alone = rank.group(tuple((r,) for r in range(4)))
    alone.all_reduce(tensor := torch.ones(3), weight=0.5).wait()
    assert tensor.tolist() == [0.5] * 3


@by_backend_and_type
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("groups", [((0, 1, 2, 3),), INTER_NODE], ids=["four", "two"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_reduce_scatter_gives_each_rank_its_part_of_the_sum(rank, dtype, groups, in_place):
    group, step = rank.group(groups), 0.5 if dtype.is_floating_point else 0.0
    for part in SIZES:
        tensor = rank.values(rank.rank, part * group.size, dtype)
        own = tensor.chunk(group.size)[group.rank] if in_place else torch.zeros(part, dtype=dtype)
        group.reduce_scatter(own, tensor, weight=1.0 + step * rank.rank).wait()
        total = sum((1.0 + step * r) * rank.values(r, part * group.size, torch.float64) for r in group.ranks)
        assert torch.equal(own, total.chunk(group.size)[group.rank].to(dtype)), part
    alone = rank.group(tuple((r,) for r in range(4)))
    alone.reduce_scatter(tensor := torch.ones(3), tensor, weight=0.5).wait()
    assert tensor.tolist() == [0.5] * 3


def test_an_all_reduce_keeps_shapes_and_leaves_neighbours_in_memory_alone(rank):
    group = rank.group()
    scalar = torch.tensor(1.5 + rank.rank)
    group.all_reduce(scalar).wait()
    assert scalar.shape == ()
    assert scalar.item() == 4 * 1.5 + 6
    matrix = torch.full((3, 5, 2), float(rank.rank))
    group.all_reduce(matrix).wait()
    assert torch.equal(matrix, torch.full((3, 5, 2), 6.0))
    whole = torch.zeros(10)
    view = whole[3:6]  # neither begins nor ends where its memory does
    view.fill_(rank.rank)
    group.all_reduce(view).wait()
    assert whole.tolist() == [0, 0, 0, 6, 6, 6, 0, 0, 0, 0]


def reduce_random(rank, dtype, waiting):
    group, generator = rank.group(), torch.Generator().manual_seed(rank.rank)
    results = []
    for numel in [1, 5, 1000, 50021, 300007]:
        tensor = torch.randn(numel, generator=generator).to(dtype)
        group.all_reduce(tensor, waiting=waiting).wait()
        results.append(tensor)
    return results


@by_backend_and_type
@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_all_reduce_gives_every_rank_the_same_bits_near_the_exact_sum(world, dtype, waiting):
    results = world.run(reduce_random, dtype, waiting)
    generators = [torch.Generator().manual_seed(rank) for rank in range(4)]
    for own, *others in zip(*results, strict=True):
        exact = sum(torch.randn(own.numel(), generator=generator).to(dtype).double() for generator in generators)
        torch.testing.assert_close(own.double(), exact, rtol=0, atol=16 * torch.finfo(dtype).eps)
        for other in others:
            assert torch.equal(own.view(torch.uint8), other.view(torch.uint8))


def test_infinities_and_nans_arrive(rank):
    group = rank.group()
    tensor = torch.tensor([float("inf"), float("nan") if rank.rank == 2 else 1.0, -0.0, 3e38])
    group.all_reduce(tensor).wait()
    assert tensor[0] == float("inf")
    assert tensor[1].isnan()
    assert tensor[2] == 0
    assert tensor[3] == float("inf")


@by_backend_and_type
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_all_gather_puts_the_parts_in_group_order(rank, dtype, in_place):
    group = rank.group()
    for part in SIZES:
        output = torch.zeros(part * rank.size, dtype=dtype)
        own = output[rank.rank * part : (rank.rank + 1) * part] if in_place else torch.empty(part, dtype=dtype)
        own.copy_(rank.values(rank.rank, part, dtype))
        group.all_gather(output, own).wait()
        assert torch.equal(output, torch.cat([rank.values(r, part, dtype) for r in range(rank.size)])), part


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_broadcast_brings_the_tensor_of_any_source(rank, dtype):
    group = rank.group()
    for source in range(rank.size):
        for numel in SIZES:
            tensor = rank.values(rank.rank, numel, dtype)
            group.broadcast(tensor, source).wait()
            assert torch.equal(tensor, rank.values(source, numel, dtype)), (source, numel)


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(torch.distributed.new_group).parameters, reason="this torch refuses to"
)
def test_a_group_keeps_the_order_it_was_given(rank):
    ranks = (2, 0, 3, 1)
    group = rank.group((ranks,))
    assert group.ranks == ranks
    assert group.ranks[group.rank] == rank.rank
    whole = torch.zeros(4)
    group.all_gather(whole, torch.tensor([float(rank.rank)])).wait()
    assert whole.tolist() == list(ranks)
    tensor = torch.tensor([float(rank.rank)])
    group.broadcast(tensor, source=2).wait()
    assert tensor.item() == 3
    part = torch.zeros(1)
    group.reduce_scatter(part, torch.arange(4.0)).wait()
    assert part.item() == 4 * group.rank
    assert group.all_gather_object(rank.rank) == list(ranks)
    received = torch.zeros(1)
    group.exchange(
        [(torch.tensor([float(rank.rank)]), (group.rank + 1) % 4)], [(received, (group.rank - 1) % 4)]
    ).wait()
    assert received.item() == ranks[group.rank - 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_exchange_passes_tensors_round_a_ring(rank, dtype):
    group = rank.group()
    for numel in SIZES:
        send = rank.values(rank.rank, numel, dtype)
        received = torch.zeros(numel, dtype=dtype)
        after, before = (rank.rank + 1) % 4, (rank.rank - 1) % 4
        group.exchange([(send, after)], [(received, before)]).wait()
        assert torch.equal(received, rank.values(before, numel, dtype)), numel
        assert torch.equal(send, rank.values(rank.rank, numel, dtype)), numel


def test_between_two_members_letters_arrive_in_the_order_they_were_sent(rank):
    group, numel = rank.group(), 1001
    others = [peer for peer in range(4) if peer != rank.rank]
    # two letters of different dtypes to everyone; the receivers list their buffers in another order of peers
    send = [(rank.values(10 * rank.rank + peer, numel, torch.float32), peer) for peer in others]
    send += [(rank.values(100 * rank.rank + peer, 5, torch.int64), peer) for peer in others]
    first = {peer: torch.zeros(numel) for peer in others}
    second = {peer: torch.zeros(5, dtype=torch.int64) for peer in others}
    receive = [(first[peer], peer) for peer in reversed(others)]
    receive += [(second[peer], peer) for peer in others]
    group.exchange(send, receive).wait()
    for peer in others:
        assert torch.equal(first[peer], rank.values(10 * peer + rank.rank, numel, torch.float32))
        assert torch.equal(second[peer], rank.values(100 * peer + rank.rank, 5, torch.int64))


def test_an_exchange_may_be_one_way_and_several_may_be_in_flight(rank):
    group = rank.group()
    received = torch.zeros(3)
    if rank.rank == 0:
        group.exchange([(torch.ones(3), 3)], []).wait()
    elif rank.rank == 3:
        group.exchange([], [(received, 0)]).wait()
        assert received.tolist() == [1, 1, 1]
    else:
        handle = group.exchange([], [])
        handle.wait()
        assert handle.is_done()
    # two exchanges launched before either is waited for
    for base in (0, 10):
        out = [torch.zeros(2) for _ in range(2)]
        peer = rank.rank ^ 1
        handles = [group.exchange([(torch.full((2,), float(base + i)), peer)], [(out[i], peer)]) for i in range(2)]
        Together(handles[::-1]).wait()
        assert [t[0].item() for t in out] == [base, base + 1]


def test_objects_of_unequal_size_are_gathered_in_order(rank):
    group = rank.group()
    everyones = group.all_gather_object({"rank": rank.rank, "text": "x" * 1000 * rank.rank})
    assert [value["rank"] for value in everyones] == [0, 1, 2, 3]
    assert [len(value["text"]) for value in everyones] == [0, 1000, 2000, 3000]
    group.barrier()


def test_empty_tensors_and_groups_of_one_move_nothing(rank):
    group, empty = rank.group(), torch.empty(0)
    for handle in [
        group.all_reduce(empty.clone()),
        group.reduce_scatter(empty.clone(), empty.clone()),
        group.all_gather(empty.clone(), empty.clone()),
        group.broadcast(empty.clone(), 0),
        group.exchange([(empty.clone(), rank.rank ^ 1)], [(empty.clone(), rank.rank ^ 1)]),
    ]:
        handle.wait()
        assert handle.is_done()
    assert rank.meter.messages["inter"] == 0
    alone = rank.group(tuple((r,) for r in range(4)))
    tensor, output = torch.arange(3.0), torch.zeros(3)
    alone.all_reduce(tensor).wait()
    alone.broadcast(tensor, 0).wait()
    alone.all_gather(output, tensor).wait()
    assert output.tolist() == tensor.tolist() == [0, 1, 2]
    output.zero_()
    alone.reduce_scatter(output, tensor).wait()
    assert output.tolist() == [0, 1, 2]
    assert alone.all_gather_object("x") == ["x"]
    assert rank.meter.messages["inter"] == 0


def test_bad_arguments_are_refused_before_anything_is_sent(rank):
    group = rank.group()
    with pytest.raises(ValueError, match="source must be a group rank from 0 to 3, not 4"):
        group.broadcast(torch.zeros(1), 4)
    with pytest.raises(ValueError, match="cannot exchange with group rank"):
        group.exchange([(torch.zeros(1), rank.rank)], [])
    with pytest.raises(ValueError, match="must hold 4 parts"):
        group.all_gather(torch.zeros(7), torch.zeros(2))
    with pytest.raises(ValueError, match="must hold 4 parts"):
        group.reduce_scatter(torch.zeros(2, dtype=torch.float64), torch.zeros(8))
    rows = torch.zeros(4, 4).t()[:, :2]
    for move in [
        lambda: group.all_reduce(rows),
        lambda: group.broadcast(rows, 0),
        lambda: group.exchange([(rows, rank.rank ^ 1)], []),
    ]:
        with pytest.raises(ValueError, match="contiguous"):
            move()
    assert rank.meter.messages["inter"] == 0
    group.barrier()  # nothing was launched, so the ranks are still together


def test_a_rank_in_no_group_gets_no_communicator(rank):
    group = rank.group(((0, 3), (1,)))
    assert (group is None) == (rank.rank == 2)
    if rank.rank in (0, 3):
        assert group.all_gather_object(rank.rank) == [0, 3]
