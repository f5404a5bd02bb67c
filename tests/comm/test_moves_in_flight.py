"""Several moves of communicators at once, and what they cost. A test with a ``rank`` runs on each of four ranks."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_hiercomm.comm.base import Together

PAIRS = ((0, 1), (2, 3))
INTER_NODE = ((0, 2), (1, 3))


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
        Together(handles[::-1]).wait()
        assert torch.equal(in_pair, torch.full((numel,), [1.0, 1.0, 5.0, 5.0][rank.rank]))
        assert torch.equal(between_nodes, torch.full((numel,), [2.0, 4.0, 2.0, 4.0][rank.rank]))


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


def test_meter_counts_the_textbook_bytes_of_each_collective_by_level(rank):
    group, pair = rank.group(), rank.group(PAIRS, "intra")
    floats, meter = torch.zeros(8), rank.meter
    Together([group.all_reduce(floats)]).wait()
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
            own = rank.values(rank.rank, 8, dtype)
            whole, part = torch.zeros(32, dtype=dtype), torch.zeros(2, dtype=dtype)
            group.all_gather(whole, own).wait()
            assert torch.equal(whole, torch.cat([rank.values(peer, 8, dtype) for peer in range(4)]))
            group.reduce_scatter(part, own.clone()).wait()
            summed = sum(rank.values(peer, 8, dtype) for peer in range(4))
            assert torch.equal(part, summed.chunk(4)[rank.rank])
            whole[8 * rank.rank :][:8] = own
            group.all_gather(whole, whole.chunk(4)[rank.rank]).wait()  # in place, as nccl knows it
            group.all_reduce(own).wait()
            assert torch.equal(own, summed)
            received, before, after = torch.zeros(8, dtype=dtype), (rank.rank - 1) % 4, (rank.rank + 1) % 4
            group.exchange([(rank.values(rank.rank, 8, dtype), after)], [(received, before)]).wait()
            assert torch.equal(received, rank.values(before, 8, dtype))
