"""What a run's nodes are connected with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lightning_hiercomm.comm.torch import TorchCommunicator
from lightning_hiercomm.nodes.connect import connect_world


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("inter_node", "is_nccl", "waits"), [("torch", True, False), ("torch", False, True), ("gloo", True, True)]
)
def test_the_host_waits_for_moves_of_a_gpu_s_tensors_but_for_nccl_s(inter_node, is_nccl, waits, monkeypatch):
    """Over gloo, too, by which tests and whoever has no nccl let GPUs exchange: jobs beside training are put off."""
    monkeypatch.setattr(TorchCommunicator, "_is_nccl", lambda communicator: is_nccl)
    topology = connect_world(0, 1, (0, 0), inter_node=inter_node)
    assert topology.waits_on_host == waits
    topology.close()
