"""Some buffers are never broadcast by DDP, in its constructor and before forward passes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_hiercomm._lightning.ddp import PassThroughDDP, in_ddp


class Layer(nn.Module):
    """Normalizes, and has buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("bank", torch.zeros(3))
        self.register_buffer("other", torch.zeros(2))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).sum()


def _joined() -> int:
    """The rank, in a process group that a test before may have made."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    return dist.get_rank()


def _ignored(folder: Path) -> list[Any]:
    rank = _joined()
    layer = Layer()
    layer.bank = torch.full((3 + rank,), float(rank))
    layer.norm.running_mean.fill_(rank)
    layer._ddp_params_and_buffers_to_ignore = ["counts"]
    layer.counts.fill_(rank)
    model = in_ddp(layer, None, {}, settled=True, ignored={"bank"})
    seen = [layer.bank.tolist(), layer.norm.running_mean.tolist(), layer._ddp_params_and_buffers_to_ignore]
    layer.other.fill_(rank + 1.0)
    model(torch.ones(2, 2)).backward()
    return [*seen, layer.other.tolist(), layer.counts.tolist()]


def test_ignored_buffers_are_never_broadcast(launch):
    for rank, seen in enumerate(launch(_ignored, 2)):
        bank, mean, named, other, counts = seen
        assert bank == [float(rank)] * (3 + rank)
        assert mean == [0.0] * 2
        assert named == ["counts"], "as the user has set it"
        assert other == [1.0] * 2
        assert counts == [rank] * 2


class Tells(nn.Module):
    """Names what DDP is to ignore in its class."""

    _ddp_params_and_buffers_to_ignore = ("bank",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("bank", torch.zeros(3))
        self.register_buffer("other", torch.zeros(3))


def test_names_of_a_class_are_ignored_with_further_ones(process_group):
    module = Tells()
    assert in_ddp(module, None, {}, settled=False, ignored={"other"}).parameters_to_ignore == {"bank", "other"}
    assert module._ddp_params_and_buffers_to_ignore == ("bank",)
    assert PassThroughDDP(module, None, {}).parameters_to_ignore == {"bank"}
