"""A strategy takes its node's part of the mesh of a world."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_hiercomm.trainer.model_parallel import _mesh_of_world


def test_gloo_groups_are_not_split_from_a_gpu_group(launch):
    """torch splits the default group there, whatever its backend, and cannot copy gloo's options."""
    assert launch(mesh_on_a_gpu, ranks=2) == [[0], [1]]


def mesh_on_a_gpu(folder: Path) -> list[int]:
    torch.cuda.is_available = lambda: True
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", 0)
    mesh = _mesh_of_world("cpu", torch.tensor([[[0]], [[1]]]))
    try:
        dist.all_reduce(torch.zeros(1))  # or rank 0 is gone, and its store with it, while the other makes its group
        return dist.get_process_group_ranks(mesh["data_parallel"].get_group())
    finally:
        dist.destroy_process_group()
