"""All communicators behave the same over every backend. A test with a ``rank`` runs on each of four ranks."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_hiercomm.comm.base import wait_all

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8]
SIZES = [1, 3, 7, 1000, 4099]
PAIRS = ((0, 1), (2, 3))
INTER_NODE = ((0, 2), (1, 3))


def values(rank, numel, dtype):
    """Small integers, so that every dtype sums them exactly: rank + 1, 1 more at every element, modulo 8."""
    return ((torch.arange(numel) + rank + 1) & 7).to(dtype)


# ---- sums and maxima -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_an_all_reduce_gives_every_rank_the_sum_or_the_maximum(rank, dtype, op):
    group = rank.group()
    for numel in SIZES:
        tensor = values(rank.rank, numel, dtype)
        group.all_reduce(tensor, op).wait()
        everyones = torch.stack([values(r, numel, torch.float64) for r in range(rank.size)])
        expected = everyones.sum(0) if op == "sum" else everyones.amax(0)
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected.to(dtype)), numel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_ranks_that_wait_in_order_reduce_the_same(rank, dtype, op):
    group, peer = rank.group(), rank.rank ^ 1
    tensors = [values(rank.rank, numel, dtype) for numel in SIZES]
    received = torch.zeros(3)
    first = [group.all_reduce(tensor, op, waiting=True) for tensor in tensors[:2]]
    exchanged = group.exchange([(torch.full((3,), float(rank.rank)), peer)], [(received, peer)])
    others = [group.all_reduce(tensor, op, waiting=True) for tensor in tensors[2:]]
    wait_all([*first, *others])
    exchanged.wait()
    assert received.tolist() == [peer] * 3
    for handle, tensor, numel in zip([*first, *others], tensors, SIZES, strict=True):
        handle.wait()
        assert handle.is_done()
        everyones = torch.stack([values(r, numel, torch.float64) for r in range(rank.size)])
        assert torch.equal(tensor, (everyones.sum(0) if op == "sum" else everyones.amax(0)).to(dtype)), numel


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["sum", "max"])
def test_two_ranks_reduce_like_many(rank, dtype, op):
    group = rank.group(INTER_NODE)
    for numel in [1, 3, 1000, *[2**20 + 1] * (dtype == torch.float32)]:
        tensor = values(rank.rank, numel, dtype)
        first = group.all_reduce(tensor, op)
        scalar = torch.tensor(rank.rank, dtype=dtype)
        second = group.all_reduce(scalar, op)
        first.wait()
        first.wait()  # a second time changes nothing
        second.wait()
        both = torch.stack([values(r, numel, torch.float64) for r in (rank.rank % 2, rank.rank % 2 + 2)])
        assert torch.equal(tensor, (both.sum(0) if op == "sum" else both.amax(0)).to(dtype)), numel
        assert scalar.shape == ()
        assert scalar.item() == (2 * (rank.rank % 2) + 2 if op == "sum" else rank.rank % 2 + 2)


@pytest.mark.parametrize("groups", [((0, 1, 2, 3),), INTER_NODE], ids=["four", "two"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_members_contribute_by_their_weights(rank, dtype, groups):
    group = rank.group(groups)
    for numel in [1, 4099]:
        tensor = values(rank.rank, numel, dtype)
        group.all_reduce(tensor, weight=0.5 * (rank.rank + 1)).wait()
        total = sum(0.5 * (r + 1) * values(r, numel, torch.float64) for r in group.ranks)
        assert torch.equal(tensor, total.to(dtype))
    alone = rank.group(tuple((r,) for r in range(4)))
    alone.all_reduce(tensor := torch.ones(3), weight=0.5).wait()
    assert tensor.tolist() == [0.5] * 3


@pytest.mark.parametrize("groups", [((0, 1, 2, 3),), INTER_NODE], ids=["four", "two"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reduce_scatter_may_write_to_a_view_of_its_input(rank, dtype, groups):
    group = rank.group(groups)
    for numel in [1, 1025]:
        tensor = values(rank.rank, numel * group.size, dtype)
        own = tensor.chunk(group.size)[group.rank]
        group.reduce_scatter(own, tensor, weight=0.5 * (rank.rank + 1)).wait()
        total = sum(0.5 * (r + 1) * values(r, numel * group.size, torch.float64) for r in group.ranks)
        assert torch.equal(own, total.chunk(group.size)[group.rank].to(dtype))
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


# ---- parts and wholes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_reduce_scatter_gives_each_rank_its_part_of_the_sum(rank, dtype):
    group = rank.group()
    for part in SIZES:
        tensor = values(rank.rank, part * rank.size, dtype)
        output = torch.zeros(part, dtype=dtype)
        group.reduce_scatter(output, tensor).wait()
        total = sum(values(r, part * rank.size, torch.float64) for r in range(rank.size))
        assert torch.equal(output, total[rank.rank * part : (rank.rank + 1) * part].to(dtype)), part


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_all_gather_puts_the_parts_in_group_order(rank, dtype, in_place):
    group = rank.group()
    for part in SIZES:
        output = torch.zeros(part * rank.size, dtype=dtype)
        own = output[rank.rank * part : (rank.rank + 1) * part] if in_place else torch.empty(part, dtype=dtype)
        own.copy_(values(rank.rank, part, dtype))
        group.all_gather(output, own).wait()
        assert torch.equal(output, torch.cat([values(r, part, dtype) for r in range(rank.size)])), part


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_broadcast_brings_the_tensor_of_any_source(rank, dtype):
    group = rank.group()
    for source in range(rank.size):
        for numel in SIZES:
            tensor = values(rank.rank, numel, dtype)
            group.broadcast(tensor, source).wait()
            assert torch.equal(tensor, values(source, numel, dtype)), (source, numel)


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


# ---- from member to member -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_exchange_passes_tensors_round_a_ring(rank, dtype):
    group = rank.group()
    for numel in SIZES:
        send = values(rank.rank, numel, dtype)
        received = torch.zeros(numel, dtype=dtype)
        after, before = (rank.rank + 1) % 4, (rank.rank - 1) % 4
        group.exchange([(send, after)], [(received, before)]).wait()
        assert torch.equal(received, values(before, numel, dtype)), numel
        assert torch.equal(send, values(rank.rank, numel, dtype)), numel


def test_between_two_members_letters_arrive_in_the_order_they_were_sent(rank):
    group, numel = rank.group(), 1001
    others = [peer for peer in range(4) if peer != rank.rank]
    # two letters of different dtypes to everyone; the receivers list their buffers in another order of peers
    send = [(values(10 * rank.rank + peer, numel, torch.float32), peer) for peer in others]
    send += [(values(100 * rank.rank + peer, 5, torch.int64), peer) for peer in others]
    first = {peer: torch.zeros(numel) for peer in others}
    second = {peer: torch.zeros(5, dtype=torch.int64) for peer in others}
    receive = [(first[peer], peer) for peer in reversed(others)]
    receive += [(second[peer], peer) for peer in others]
    group.exchange(send, receive).wait()
    for peer in others:
        assert torch.equal(first[peer], values(10 * peer + rank.rank, numel, torch.float32))
        assert torch.equal(second[peer], values(100 * peer + rank.rank, 5, torch.int64))


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
        wait_all(handles[::-1])
        assert [t[0].item() for t in out] == [base, base + 1]


# ---- objects, nothing, and bad arguments -----------------------------------------------------------------------------


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


# ---- several moves in flight -----------------------------------------------------------------------------------------


def test_three_members_sum_too(rank):
    trio = rank.group([[0, 1, 2], [3]])
    for numel in [5, 1000, 100003]:
        for waiting in (False, True):
            tensor = torch.full((numel,), 2.0**rank.rank)
            trio.all_reduce(tensor, waiting=waiting).wait()
            assert torch.equal(tensor, torch.full((numel,), 8.0 if rank.rank == 3 else 7.0))


def test_two_groups_move_at_once_in_any_order(rank):
    pairs, inter = rank.group(PAIRS, "intra"), rank.group(INTER_NODE, "inter")
    for numel in [5, 100003]:
        in_pair, between_nodes = torch.full((numel,), float(rank.rank)), torch.full((numel,), float(rank.rank))
        first, second = (pairs, inter) if rank.rank % 2 else (inter, pairs)  # ranks launch in different orders
        handles = [
            group.all_reduce(tensor)
            for group, tensor in zip(
                (first, second), (in_pair, between_nodes) if first is pairs else (between_nodes, in_pair), strict=True
            )
        ]
        wait_all(handles[::-1])
        assert torch.equal(in_pair, torch.full((numel,), [1.0, 1.0, 5.0, 5.0][rank.rank]))
        assert torch.equal(between_nodes, torch.full((numel,), [2.0, 4.0, 2.0, 4.0][rank.rank]))


def test_two_communicators_of_the_same_ranks_do_not_mix(rank):
    communicators = [rank.group(duplicate=0), rank.group(duplicate=1)]
    order = (0, 1) if rank.rank % 2 else (1, 0)
    tensors = [torch.full((50001,), 1.0 + rank.rank), torch.full((50001,), 10.0 * rank.rank)]
    handles = [communicators[i].all_reduce(tensors[i]) for i in order]
    wait_all(handles)
    assert torch.equal(tensors[0], torch.full((50001,), 10.0))
    assert torch.equal(tensors[1], torch.full((50001,), 60.0))


def test_two_threads_may_each_use_a_communicator(rank):
    communicators = [rank.group(duplicate=0), rank.group(duplicate=1)]
    errors = []

    def work(group, scale):
        try:
            for i in range(50):
                tensor = torch.full((1 + 97 * i,), scale * (rank.rank + i))
                group.all_reduce(tensor).wait()
                assert torch.equal(tensor, torch.full_like(tensor, scale * (6 + 4 * i)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(communicators[i], float(i + 1))) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_collectives_of_a_group_can_be_awaited_in_any_order(rank):
    group, peer = rank.group(), rank.rank ^ 1
    sums = [torch.full((101 * i + 1,), float(rank.rank + i)) for i in range(20)]
    whole, part, received = torch.zeros(8), torch.full((2,), float(rank.rank)), torch.zeros(3)
    handles = [group.all_reduce(tensor) for tensor in sums]
    handles.append(group.all_gather(whole, part))
    handles.append(group.exchange([(torch.full((3,), float(rank.rank)), peer)], [(received, peer)]))
    last = torch.tensor([float(rank.rank)])
    handles.append(group.broadcast(last, 3))
    for handle in reversed(handles):
        handle.wait()
        handle.wait()  # a second time does nothing
        assert handle.is_done()
    for i, tensor in enumerate(sums):
        assert torch.equal(tensor, torch.full_like(tensor, 6.0 + 4 * i))
    assert whole.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert received.tolist() == [peer] * 3
    assert last.item() == 3


def test_launching_does_not_wait_for_peers(rank):
    group, other = rank.group(duplicate=0), rank.group(duplicate=1)
    tensor, token = torch.full((200003,), 1.0), torch.zeros(1)
    if rank.rank == 0:
        handle = group.all_reduce(tensor)  # its peers are not there yet, and wait for the token
        assert not handle.is_done()
        other.broadcast(token, 0).wait()
    else:
        other.broadcast(token, 0).wait()
        handle = group.all_reduce(tensor)
    handle.wait()
    assert torch.equal(tensor, torch.full((200003,), 4.0))


def test_a_receive_is_not_done_before_its_letter_was_sent(rank):
    group, other = rank.group(duplicate=0), rank.group(duplicate=1)
    received, token = torch.zeros(3), torch.zeros(1)
    if rank.rank == 0:
        handle = group.exchange([], [(received, 1)])
        assert not handle.is_done()
    other.broadcast(token, 0).wait()  # rank 1 sends after that
    if rank.rank == 1:
        group.exchange([(torch.ones(3), 0)], []).wait()
    if rank.rank == 0:
        handle.wait()
        assert handle.is_done()
        assert received.tolist() == [1, 1, 1]


@pytest.mark.parametrize("world", ["gloo"], indirect=True)
def test_gloo_exchanges_between_nodes_run_one_after_another(rank):
    group, other = rank.group(duplicate=0), rank.group(duplicate=1)
    first, second, token = torch.zeros(3), torch.zeros(3), torch.zeros(1)
    if rank.rank == 0:
        handles = [group.exchange([], [(first, 1)]), group.exchange([], [(second, 2)])]
    elif rank.rank == 2:
        handles = [group.exchange([(torch.full((3,), 2.0), 0)], [])]
    else:
        handles = []
    other.broadcast(token, 2).wait()
    if rank.rank == 0:
        time.sleep(0.1)  # enough for a message that is awaited
        assert second.tolist() == [0, 0, 0]
    other.broadcast(token, 0).wait()
    if rank.rank == 1:
        handles = [group.exchange([(torch.ones(3), 0)], [])]
    for handle in handles:
        handle.wait()
    if rank.rank == 0:
        assert first.tolist() == [1, 1, 1]
        assert second.tolist() == [2, 2, 2]


@pytest.mark.parametrize("move", ["all_reduce", "all_gather", "exchange"])
def test_a_move_makes_progress_while_its_owner_does_something_else(rank, tmp_path, move):
    group = rank.group()
    tensor, whole = torch.full((1 << 20,), 1.0), torch.zeros(1 << 22)
    received = torch.zeros(1 << 20)
    if move == "all_reduce":
        handle = group.all_reduce(tensor)
    elif move == "all_gather":
        handle = group.all_gather(whole, tensor)
    else:
        handle = group.exchange([(tensor, (rank.rank + 1) % 4)], [(received, (rank.rank - 1) % 4)])
    if rank.rank == 0:
        deadline = time.monotonic() + 20
        while len(list(tmp_path.iterdir())) < 3:  # no call that could drive the backend
            assert time.monotonic() < deadline, "a move only goes on while its owner waits for it"
            time.sleep(0.01)
    handle.wait()
    (tmp_path / str(rank.rank)).touch()
    result = {"all_reduce": tensor, "all_gather": whole, "exchange": received}[move]
    assert result.sum().item() == (1 << 20) * (1 if move == "exchange" else 4)


def test_futures_complete_with_their_move(rank):
    group = rank.group()
    for numel in [3, 100003]:
        tensor = torch.full((numel,), float(rank.rank))
        future = group.all_reduce(tensor).future(tensor)
        assert future.wait() is tensor or torch.equal(future.value(), tensor)
        assert torch.equal(tensor, torch.full((numel,), 6.0))
        part, parts = torch.zeros(numel), torch.full((4 * numel,), float(rank.rank))
        assert torch.equal(group.reduce_scatter(part, parts).future(part).wait(), torch.full((numel,), 6.0))


# ---- what it costs ---------------------------------------------------------------------------------------------------


def test_meter_counts_the_textbook_bytes_of_each_collective_by_level(rank):
    group, pair = rank.group(), rank.group(PAIRS, "intra")
    floats, meter = torch.zeros(8), rank.meter
    wait_all([group.all_reduce(floats)])
    assert (meter.bytes["inter"], meter.messages["inter"]) == (2 * 3 / 4 * 32, 1)
    group.reduce_scatter(torch.zeros(2), floats).wait()
    assert (meter.bytes["inter"], meter.messages["inter"]) == (48 + 3 / 4 * 32, 2)
    group.all_gather(floats, torch.zeros(2)).wait()
    assert (meter.bytes["inter"], meter.messages["inter"]) == (72 + 3 / 4 * 32, 3)
    group.broadcast(floats, 1).wait()
    assert meter.bytes["inter"] == 96 + (32 if rank.rank == 1 else 0)
    before = meter.bytes["inter"]
    sends = [(torch.zeros(3, dtype=torch.bfloat16), rank.rank ^ 1)] * (rank.rank % 2)
    receives = [(torch.zeros(3, dtype=torch.bfloat16), rank.rank ^ 1)] * (1 - rank.rank % 2)
    group.exchange(sends, receives).wait()
    assert meter.bytes["inter"] == before + 6 * (rank.rank % 2)
    pair.all_reduce(floats).wait()
    assert (meter.bytes["intra"], meter.messages["intra"]) == (32, 1)
    assert meter.bytes["world"] == 0


def test_only_waits_of_training_are_exposed(rank):
    group = rank.group()
    handle = group.all_reduce(torch.zeros(1000))
    assert rank.meter.seconds.get("inter", 0.0) == 0.0
    handle.wait()
    waited = rank.meter.seconds["inter"]
    assert waited > 0
    handle = group.all_reduce(torch.zeros(1000))

    def wait_in_parallel():
        with rank.meter.overlapped():
            handle.wait()

    thread = threading.Thread(target=wait_in_parallel)
    thread.start()
    thread.join()
    assert rank.meter.seconds["inter"] == waited


def test_on_a_gpu_a_wait_is_exposed_while_the_gpu_is_idle(rank):
    """The host may wait for training, too, which is behind it."""
    marks = []
    rank.meter.add_wait = lambda level, start, end: marks.extend((start, end))
    try:
        rank.group().all_reduce(torch.zeros(1000)).wait()
    finally:
        del rank.meter.add_wait
    assert marks
    assert {isinstance(mark, float) for mark in marks} == {rank.device is None}


def test_tensors_made_in_inference_mode_are_moved(rank):
    """A validation averages in it, and threads that move them are not in it by themselves."""
    group, peers = rank.group(), [peer for peer in range(rank.size) if peer != rank.rank]
    with torch.inference_mode():
        tensor, whole, part = torch.full((4,), float(rank.rank)), torch.zeros(16), torch.zeros(1)
        received = [torch.zeros(4) for _ in peers]
        group.all_gather(whole, tensor).wait()
        group.exchange([(tensor, peer) for peer in peers], list(zip(received, peers, strict=True))).wait()
        group.reduce_scatter(part, tensor.clone()).wait()
        group.all_reduce(large := torch.full((2**16,), float(rank.rank)), waiting=True).wait()
        group.all_reduce(tensor).wait()
        group.broadcast(own := torch.full((3,), float(rank.rank)), source=1).wait()
    assert whole.tolist() == [float(peer) for peer in range(4) for _ in range(4)]
    assert [each.tolist() for each in received] == [[peer] * 4 for peer in peers]
    assert [part.item(), *tensor.tolist(), *own.tolist(), large[-1].item()] == [6.0] * 5 + [1.0] * 3 + [6.0]


@pytest.mark.parametrize("world", ["gloo"], indirect=True)
@pytest.mark.parametrize("is_nccl", [False, True])
def test_moves_of_a_gpu_s_tensors_are_those_that_torch_knows_of_them(rank, is_nccl):
    """As torch is asked for moves of a GPU's tensors, which lie on the CPU here, where gloo moves them."""
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    from fake_streams import FakeDevice

    group = rank.group()
    with pytest.MonkeyPatch.context() as patch, FakeDevice().installed():
        patch.setattr(group, "is_nccl", is_nccl)
        for dtype in (torch.float32, torch.complex64, torch.int64):
            own = values(rank.rank, 8, dtype)
            whole, part = torch.zeros(32, dtype=dtype), torch.zeros(2, dtype=dtype)
            group.all_gather(whole, own).wait()
            assert torch.equal(whole, torch.cat([values(peer, 8, dtype) for peer in range(4)]))
            group.reduce_scatter(part, own.clone()).wait()
            summed = sum(values(peer, 8, dtype) for peer in range(4))
            assert torch.equal(part, summed.chunk(4)[rank.rank])
            whole[8 * rank.rank :][:8] = own
            group.all_gather(whole, whole.chunk(4)[rank.rank]).wait()  # in place, as nccl knows it
            group.all_reduce(own).wait()
            assert torch.equal(own, summed)
            received, before, after = torch.zeros(8, dtype=dtype), (rank.rank - 1) % 4, (rank.rank + 1) % 4
            group.exchange([(values(rank.rank, 8, dtype), after)], [(received, before)]).wait()
            assert torch.equal(received, values(before, 8, dtype))
