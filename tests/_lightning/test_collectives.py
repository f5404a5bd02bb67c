"""Counts of torch's collectives, and the state of its process groups."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from lightning_hiercomm._lightning import collectives
from lightning_hiercomm._lightning.collectives import (
    collectives_begun,
    collectives_of_default_group,
)


def test_torch_counts_the_collectives_of_all_groups(process_group):
    before = collectives_begun()
    dist.all_reduce(torch.ones(1))
    dist.broadcast(torch.ones(1), src=0, group=dist.new_group([0]))
    assert collectives_begun() >= before + 2


def test_collectives_of_another_group_are_not_the_default_groups(process_group):
    before = collectives_of_default_group()
    dist.barrier()
    other = dist.new_group([0])
    dist.barrier(other)
    assert collectives_of_default_group() == before + 1
    dist.destroy_process_group(other)


ONE = torch.ones(1)
COLLECTIVES = {
    "all_reduce": lambda: dist.all_reduce(ONE.clone()),
    "broadcast": lambda: dist.broadcast(ONE.clone(), 0),
    "all_gather": lambda: dist.all_gather([ONE.clone()], ONE),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(ONE.clone(), ONE),
    "all_gather_object": lambda: dist.all_gather_object([None], 1),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ONE.clone(), ONE),
    "all_to_all_single": lambda: dist.all_to_all_single(ONE.clone(), ONE),
    "functional all_reduce": lambda: functional.all_reduce(ONE.clone(), "sum", dist.group.WORLD) + 0,
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_torch_counts_every_collective_of_the_default_group(process_group, name):
    before = collectives_of_default_group()
    COLLECTIVES[name]()
    assert collectives_of_default_group() > before


def test_a_backend_without_sequence_numbers_counts_nothing(process_group):
    backend = SimpleNamespace(_get_sequence_number_for_group=mock.Mock(side_effect=RuntimeError("not supported")))
    group = SimpleNamespace(_device_types=("cpu", "cuda"), _get_backend=lambda device: backend)
    dist.barrier()
    assert collectives._begun_in(group) == 0
    assert collectives._begun_in(dist.group.WORLD) > 0


def test_a_group_that_is_destroyed_meanwhile_ends_no_count(process_group, monkeypatch):
    class Destroyed:
        @property
        def _device_types(self):
            raise RuntimeError("the process group is gone")

    before = collectives_begun()
    groups = [*collectives.process_groups()]
    monkeypatch.setattr(collectives, "process_groups", lambda: [Destroyed(), *groups])
    assert collectives_begun() == before


def test_without_process_groups_no_collective_has_begun():
    assert collectives_begun() == 0
