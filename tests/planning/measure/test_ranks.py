"""The ranks that a launcher started, as planning finds them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_hiercomm.planning.measure.ranks import connected


@pytest.mark.parametrize(
    ("gpus", "backend", "device"), [(0, "gloo", "cpu"), (1, "nccl", "cuda:0"), (4, "nccl", "cuda:3")]
)
def test_each_rank_takes_a_gpu_with_nccl(monkeypatch, gpus, backend, device):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # which is there already is left alone
    with connected() as ranks:
        assert (ranks.backend, ranks.device) == (backend, torch.device(device))
    assert taken == [torch.device(device)] * (gpus > 0)
