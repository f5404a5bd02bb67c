"""What the conformance suite does not ask of a communicator over shared memory. The ranks are processes."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from lightning_hiercomm.comm.base import CommunicationError, Together, finished
from lightning_hiercomm.comm.shared_memory import SharedMemoryCommunicator, sharing_memory
from lightning_hiercomm.comm.torch import TorchCommunicator

over_shared_memory = pytest.mark.parametrize("world", ["shared-memory"], indirect=True)
PAIRS = ((0, 1), (2, 3))


@pytest.mark.long("four ranks move tensors of many sizes and types")
@over_shared_memory
def test_tensors_of_many_slots_and_odd_sizes_arrive(rank):
    generator = torch.Generator().manual_seed(0)
    for group in (rank.group(), rank.group(PAIRS, "intra")):
        everyones = [torch.randint(0, 100, (group.size, 800_003), generator=generator) for _ in range(group.size)]
        total = sum(everyones)
        scattered, gathered = torch.empty_like(total[0]), torch.empty(total.numel(), dtype=torch.int64)
        reduced, spread = everyones[group.rank].clone(), everyones[group.rank].clone()
        Together(
            [
                group.reduce_scatter(scattered, everyones[group.rank].flatten()),
                group.all_gather(gathered, everyones[group.rank][0].clone()),
                group.all_reduce(reduced),
                group.broadcast(spread, 1),
            ]
        ).wait()
        assert torch.equal(scattered, total[group.rank])
        assert torch.equal(gathered, torch.cat([rows[0] for rows in everyones]))
        assert torch.equal(reduced, total)
        assert torch.equal(spread, everyones[1])


@over_shared_memory
def test_tensors_of_other_devices_go_over_the_process_group(rank):
    group, part, whole = rank.group(), torch.zeros(2, device="meta"), torch.zeros(8, device="meta")
    names = ["_all_reduce", "_reduce_scatter", "_all_gather", "_broadcast"]
    with ExitStack() as stack:
        over_torch = {n: stack.enter_context(patch.object(TorchCommunicator, n, return_value=finished)) for n in names}
        group.all_reduce(part, weight=0.5).wait()
        group.reduce_scatter(part, whole).wait()
        group.all_gather(whole, part).wait()
        group.broadcast(part, 1).wait()
    assert [move.call_count for move in over_torch.values()] == [1] * 4


@over_shared_memory
def test_the_death_of_a_member_ends_the_moves_of_all_others_at_once(rank):
    group = rank.group(duplicate="lost")
    group.barrier()
    if rank.rank == 3:
        for each in group.sockets:  # as the kernel does when a process dies
            each.close()
        return
    started = time.monotonic()
    handles = [group.all_reduce(torch.zeros(10)) for _ in range(2)]
    for handle in handles:
        with pytest.raises(CommunicationError, match="lost its inter group"):
            handle.wait()
    assert time.monotonic() - started < 5


@over_shared_memory
def test_tensors_of_unequal_sizes_are_an_error(rank):
    group = rank.group(duplicate="unequal")
    with pytest.raises(CommunicationError):
        group.all_reduce(torch.zeros(10 if rank.rank else 11)).wait()


@over_shared_memory
def test_only_groups_whose_members_can_share_memory_do(rank):
    if rank.rank == 2:
        os.environ["HIERCOMM_SHARED_MEMORY"] = "0"
    try:
        own = rank.connect(PAIRS, "intra")
    finally:
        os.environ.pop("HIERCOMM_SHARED_MEMORY", None)
    assert isinstance(own, SharedMemoryCommunicator) == (rank.rank < 2)
    assert isinstance(own, TorchCommunicator)
    tensor = torch.full((3,), float(rank.rank))
    own.all_reduce(tensor).wait()
    assert tensor.tolist() == [1.0 if rank.rank < 2 else 5.0] * 3


def leave_nothing_behind(rank):
    group = rank.connect(PAIRS, "intra")
    group.all_reduce(torch.zeros(3)).wait()
    sockets = group.sockets
    assert not [name for name in os.listdir("/dev/shm") if "hiercomm" in name]
    group.close()
    assert all(each.fileno() == -1 for each in sockets)
    with open("/proc/self/maps") as maps:
        return sum("hiercomm" in line for line in maps)


@over_shared_memory
def test_closing_gives_back_memory_and_sockets(world):
    before = world.run(leave_nothing_behind)
    assert world.run(leave_nothing_behind) == before


def test_a_group_over_nccl_shares_no_memory():
    group = object.__new__(TorchCommunicator)
    group.size, group.is_nccl = 2, True
    assert sharing_memory(lambda groups, level: group)([[0, 1]], "intra") is group
