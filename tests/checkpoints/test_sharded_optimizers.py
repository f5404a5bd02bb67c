"""Which number a file gives to an optimizer's parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_hiercomm.checkpoints.sharded_optimizers import load_optimizers, numbered_by_optimizer


def test_numbers_follow_the_optimizers_order_as_its_own_do():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    one, bias, other, last = module.parameters()
    optimizer = torch.optim.SGD(
        [{"params": [last, one]}, {"params": [bias], "weight_decay": 0.1}], lr=0.1, momentum=0.9
    )
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    own = optimizer.state_dict()
    places = {0: 3, 1: 0, 2: 1}  # the optimizer's numbers, and the module's
    by_place = {
        "state": {places[number]: state for number, state in own["state"].items()},
        "param_groups": [
            {**group, "params": sorted(places[n] for n in group["params"])} for group in own["param_groups"]
        ],
    }
    numbered = numbered_by_optimizer(by_place, optimizer, module.parameters())
    assert numbered["param_groups"] == own["param_groups"]
    assert numbered["state"].keys() == own["state"].keys()
    for number, state in own["state"].items():
        assert numbered["state"][number] is state
    assert other.grad is not None, "it has a gradient, and no optimizer"


def test_a_file_without_optimizers_is_refused(tmp_path):
    module = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="holds the states of 0 optimizers, but this run has 1: resume from one"):
        load_optimizers(tmp_path / "weights.ckpt", [], module, [torch.optim.SGD(module.parameters())], strict=True)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_an_optimizer_without_steps_of_its_own_is_refused_with_the_remedy(tmp_path, kind):
    module = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(module.parameters())
    path = tmp_path if kind == "directory" else tmp_path / "run.ckpt"
    with pytest.raises(ValueError, match=r"state of LBFGS .* cannot be resumed .*: restart from its weights"):
        load_optimizers(path, [optimizer.state_dict()], module, [optimizer], strict=True)


def test_a_learning_rate_is_restored_without_other_optimizer_state(tmp_path):
    module = nn.Linear(2, 1)
    saved, resumed = (torch.optim.SGD(module.parameters(), lr=lr) for lr in (0.01, 0.1))
    load_optimizers(tmp_path / "saved.ckpt", [saved.state_dict()], module, [resumed], strict=True)
    assert resumed.param_groups[0]["lr"] == 0.01
