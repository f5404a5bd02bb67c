"""What a run's nodes are connected with."""

from __future__ import annotations

import multiprocessing

import pytest
import torch.distributed as dist

from lightning_hiercomm.comm.torch import TorchCommunicator
from lightning_hiercomm.nodes.connect import connect_world, leave_behind
from lightning_hiercomm.nodes.hosts import Place

pytestmark = pytest.mark.usefixtures("process_group")


def _connects_in_a_fork(done):
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    connect_world(0, 1, Place(0, 0)).close()
    done.set()


def test_abandoned_topologies_are_closed_after_the_next_connect():
    first = connect_world(0, 1, Place(0, 0))
    leave_behind(first)
    second = connect_world(0, 1, Place(0, 0))
    assert first.is_closed
    assert not second.is_closed
    second.close()


def test_a_fork_does_not_wait_for_threads_of_its_parent():
    """The threads that it would wait for are not there."""
    left = connect_world(0, 1, Place(0, 0))
    leave_behind(left)
    fork = multiprocessing.get_context("fork")
    done = fork.Event()
    process = fork.Process(target=_connects_in_a_fork, args=(done,), daemon=True)
    process.start()
    process.join(60)
    process.kill()
    assert done.is_set()
    connect_world(0, 1, Place(0, 0)).close()
    assert left.is_closed


@pytest.mark.parametrize(
    ("inter_node", "is_nccl", "waits"), [("torch", True, False), ("torch", False, True), ("gloo", True, True)]
)
def test_the_host_waits_for_moves_of_a_gpu_s_tensors_but_for_nccl_s(inter_node, is_nccl, waits, monkeypatch):
    """Over gloo, which connects GPUs in tests and without nccl, overlapped jobs are put off, too."""
    monkeypatch.setattr(TorchCommunicator, "_is_nccl", lambda communicator: is_nccl)
    topology = connect_world(0, 1, Place(0, 0), inter_node=inter_node)
    assert topology.waits_on_host == waits
    topology.close()
