"""Modules on Fabric: parameters that are unfrozen or come too late, and teachers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from trainer.conftest import by_sgd, linear, step

from lightning_hiercomm import AllReduce, PeriodicAveraging


def unfreezing(fabric, strategy):
    """The bias is frozen after the setup, for three steps."""
    module = linear(1, 1, weight=1.0)
    module.unused = nn.Parameter(torch.ones(1, dtype=torch.float64))
    model, optimizer = by_sgd(fabric, module)
    target, seen = float(fabric.global_rank), []
    for number in range(6):
        module.bias.requires_grad_(number >= 3)
        module.unused.requires_grad_(number >= 3)
        fabric.backward(0.5 * (model(torch.zeros(1, 1, dtype=torch.float64)) + module.weight - target).square().sum())
        assert module.unused.grad is None  # weight decay and momentum would move what has one of zeros
        optimizer.step()
        optimizer.zero_grad()
        seen.append((module.weight.item(), module.bias.item()))
    strategy.finish()
    return [*seen, (module.weight.item(), module.bias.item())]


@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(1)], ids=repr)
def test_parameters_frozen_after_the_setup_get_equal_gradients_later(launched, scheme):
    weight, bias, expected = 1.0, 0.0, []
    for number in range(6):  # of all ranks the mean, whose targets' mean is 1.5
        gradient = weight + bias - 1.5
        weight, bias = weight - 0.1 * gradient, bias - 0.1 * gradient * (number >= 3)
        expected.append((weight, bias))
    for seen in launched(scheme, unfreezing, find_unused_parameters=True):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor([*expected, expected[-1]]), rtol=1e-9, atol=1e-9)


def late(fabric, strategy, is_added):
    """The bias is added, or unfrozen, after the setup."""
    module = linear(1, 1, bias=not is_added)
    if not is_added:
        module.bias.requires_grad_(False)
    model, optimizer = by_sgd(fabric, module)
    step(fabric, model(torch.ones(1, 1).double()).sum(), optimizer)
    if is_added:
        module.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer.add_param_group({"params": [module.bias]})
    module.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"^bias of Linear was added or unfrozen .*find_unused_parameters=True"):
        step(fabric, model(torch.ones(1, 1).double()).sum(), optimizer)


@pytest.mark.parametrize("is_added", [False, True], ids=["unfrozen", "added"])
def test_parameters_that_ddp_does_not_know_are_refused_by_name(launched, is_added):
    launched(PeriodicAveraging(2), late, is_added)


def unfreezing_between_synchronizations(fabric, strategy):
    module, seen = linear(1, 1), []
    model, optimizer = by_sgd(fabric, module, lr=0.5)
    for number in range(3):
        module.bias.requires_grad_(number >= 2)
        output = model(torch.ones(1, 1).double())
        step(fabric, 0.5 * (output - 4.0 * (fabric.global_rank // 2)).square().sum(), optimizer)
        seen.append((module.weight.item(), module.bias.item()))
    # towards 0 on one node and 4 on the other, by halves; before the third pass their average is 1.5
    expected = [[(0.0, 0.0), (0.0, 0.0), (0.75, -0.75)], [(2.0, 0.0), (3.0, 0.0), (2.75, 1.25)]]
    assert seen == expected[fabric.global_rank // 2], seen


def test_nodes_synchronize_before_the_first_forward_after_an_unfreeze(launched):
    launched(PeriodicAveraging(5), unfreezing_between_synchronizations, find_unused_parameters=True)


def with_friends(fabric, strategy):
    """A module whose teacher is a part of it, and one with a teacher, and averages, outside it."""
    module, outside = nn.Linear(2, 1), nn.Linear(2, 1)
    module.teacher = nn.Parameter(torch.zeros(2), requires_grad=False)
    model, optimizer = by_sgd(fabric, module)
    teacher = fabric.setup_module(outside.requires_grad_(False))
    normal = fabric.setup_module(nn.SyncBatchNorm(2, affine=False))  # DDP takes none with parameters on a CPU
    assert dist.get_process_group_ranks(normal.process_group) == [*strategy.topology.intra.ranks]
    average, copied = AveragedModel(model), copy.deepcopy(model)
    assert copied.weight is not module.weight
    for _ in range(2):
        step(fabric, (model(torch.ones(1, 2)) - fabric.global_rank).square().sum(), optimizer)
        average.update_parameters(model)
        outside.bias.fill_(fabric.global_rank)
        module.teacher.fill_(2.0 * fabric.global_rank)
    fabric.backward(copied(torch.ones(1, 2)).sum() * 0.0)
    with strategy.averaged_model():
        assert [teacher.bias.item(), *module.teacher.tolist()] == [1.5, 3.0, 3.0]
    assert [outside.bias.item(), module.teacher[0].item()] == [fabric.global_rank, 2.0 * fabric.global_rank]
    strategy.finish()
    assert [outside.bias.item(), *module.teacher.tolist()] == [1.5, 3.0, 3.0]


def test_teachers_are_part_of_the_averaged_model_and_averages_are_copied(launched):
    launched(PeriodicAveraging(5), with_friends)
