"""DDP broadcasts buffers before forward passes; ranks may hold some of other shapes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hiercomm._lightning.ddp import CopiedDDP, ignore_in_ddp, in_ddp


class Layer(nn.Module):
    """Normalizes, and has buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("bank", torch.zeros(3))
        self.register_buffer("other", torch.zeros(2))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.long))
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).sum()


Change = Callable[[Layer, int, int], None]
"""What a rank does before a step: ``change(layer, rank, step)``."""


def _assign_equal(layer: Layer, rank: int, step: int) -> None:
    layer.bank = torch.full((3,), 10.0 * step + rank)


def _grow_equally(layer: Layer, rank: int, step: int) -> None:
    layer.bank = torch.full((3 + step,), 10.0 * step + rank)


def _come_late(layer: Layer, rank: int, step: int) -> None:
    if step == 1:
        layer.late = torch.full((2,), 1.0 + rank)


def _go(layer: Layer, rank: int, step: int) -> None:
    if step == 1:
        layer.bank = None


SAME_AS_DDP = {"assigned": _assign_equal, "grown": _grow_equally, "late": _come_late, "gone": _go}
"""Changes that all ranks make alike: then all take the first one's values, as with DDP."""


def _first_longer(layer: Layer, rank: int, step: int) -> None:
    layer.bank = torch.full((9 - 2 * rank + step,), 10.0 * step + rank)


def _first_shorter(layer: Layer, rank: int, step: int) -> None:
    layer.bank = torch.full((3 + 2 * rank + step,), 10.0 * step + rank)


def _only_first(layer: Layer, rank: int, step: int) -> None:
    if rank == 0:
        layer.bank = torch.full((5,), float(step))
    else:
        layer.bank.fill_(100.0 + step)


def _only_second(layer: Layer, rank: int, step: int) -> None:
    if rank == 1:
        layer.bank = torch.full((5,), float(step))


def _first_resized_in_place(layer: Layer, rank: int, step: int) -> None:
    if rank == 0:
        layer.bank.resize_(5).fill_(float(step))
    else:
        layer.bank.fill_(100.0 + step)


def _other_type(layer: Layer, rank: int, step: int) -> None:
    layer.bank = torch.full((3,), 10.0 * step + rank, dtype=[torch.float32, torch.float64][rank])


def _late_on_second(layer: Layer, rank: int, step: int) -> None:
    if rank == 1:
        layer.late = torch.full((2,), float(step))


DIFFERENT = {
    "first longer": _first_longer,
    "first shorter": _first_shorter,
    "only first": _only_first,
    "only second": _only_second,
    "first resized": _first_resized_in_place,
    "other type": _other_type,
    "late on second": _late_on_second,
}


def _joined() -> int:
    """The rank, in a process group that a test before may have made."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    return dist.get_rank()


def _stepped(changes: dict[str, Change], folder: Path) -> dict[tuple[str, str], list[Any]]:
    """What buffers hold after the broadcast of every step, and what ``change`` has left."""
    rank = _joined()
    seen: dict[tuple[str, str], list[Any]] = {}
    for name, change in changes.items():
        for kind in (CopiedDDP, DistributedDataParallel):
            if kind is DistributedDataParallel and name not in SAME_AS_DDP:
                continue  # it would end a process
            layer = Layer()
            model, steps = kind(layer), []
            for step in range(1, 4):
                change(layer, rank, step)
                layer.other.fill_(rank + step)
                layer.counts.fill_(rank + 5)
                own = None if layer.bank is None else layer.bank.clone()
                model(torch.randn(4, 2, generator=torch.Generator().manual_seed(rank))).backward()
                held = {key: value.clone() for key, value in layer.state_dict().items()}
                steps.append((own, held))
            seen[name, kind.__name__] = steps
    return seen


@pytest.fixture(scope="module")
def ranks(launch: Any) -> list[dict[tuple[str, str], list[Any]]]:
    return launch(partial(_stepped, {**SAME_AS_DDP, **DIFFERENT}), 2)


@pytest.mark.parametrize("name", SAME_AS_DDP)
def test_buffers_that_all_ranks_change_alike_are_broadcast_as_by_ddp(ranks, name):
    for rank in ranks:
        for (_, ours), (_, ddps) in zip(rank[name, "CopiedDDP"], rank[name, "DistributedDataParallel"], strict=True):
            assert ours.keys() == ddps.keys()
            assert all(torch.equal(ours[key], ddps[key]) for key in ddps)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_buffer_of_another_shape_stays_its_ranks_own(ranks, name):
    for rank in ranks:
        for own, held in rank[name, "CopiedDDP"]:
            assert torch.equal(held["bank"], own)


@pytest.mark.parametrize("name", DIFFERENT)
def test_buffers_next_to_one_of_another_shape_are_broadcast(ranks, name):
    for (_, first), (_, second) in zip(*(rank[name, "CopiedDDP"] for rank in ranks), strict=True):
        assert first["other"].tolist() == second["other"].tolist()
        assert first["counts"].tolist() == second["counts"].tolist() == [5, 5]
    for rank, late in zip(ranks, (None, 3.0), strict=True):
        held = rank[name, "CopiedDDP"][-1][1].get("late")
        assert (None if held is None else held[0].item()) == (late if name == "late on second" else None)


def _ignored(folder: Path) -> list[Any]:
    rank = _joined()
    layer = Layer()
    layer.bank = torch.full((3 + rank,), float(rank))
    layer.norm.running_mean.fill_(rank)
    layer._ddp_params_and_buffers_to_ignore = ["counts"]
    layer.counts.fill_(rank)
    model = in_ddp(layer, None, {}, settled=True, ignored={"bank"})
    seen = [layer.bank.tolist(), layer.norm.running_mean.tolist(), layer._ddp_params_and_buffers_to_ignore]
    for step in range(2):
        layer.other.fill_(rank + 1.0)
        model(torch.ones(2, 2)).backward()
        seen += [layer.other.tolist(), layer.counts.tolist()]
        if step == 0:
            ignore_in_ddp(model, {"other"})
    return seen


def test_ignored_buffers_are_never_broadcast(launch):
    for rank, seen in enumerate(launch(_ignored, 2)):
        bank, mean, named, other, counts, other_later, counts_later = seen
        assert bank == [float(rank)] * (3 + rank)
        assert mean == [0.0] * 2
        assert named == ["counts"], "as the user has set it"
        assert other == [1.0] * 2
        assert other_later == [rank + 1.0] * 2
        assert counts == counts_later == [rank] * 2
