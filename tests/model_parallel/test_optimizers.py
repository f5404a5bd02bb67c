"""Optimizers of sharded modules that step in halves, or with gradients that are not averaged."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_hiercomm import AllReduce, HierarchicalModelParallelStrategy, PeriodicAveraging

from .conftest import trainer, whole_state
from .sharded import Net


class SAM(torch.optim.Optimizer):
    """As that of github.com/davda54/sam; the norm is taken as 1."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * self.param_groups[0]["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure):
        with torch.enable_grad():
            closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class Sharpness(Net):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.automatic_optimization = how == "hook"

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        if self.how == "plain":
            loss.backward()
            self.optimizers().step()
            self.optimizers().zero_grad()
        elif self.how == "halves":
            self.manual_backward(loss)
            self.optimizers().first_step()
            self.manual_backward(self.loss(batch))
            self.optimizers().second_step()
        else:
            self.optimizers().step(closure=lambda: self.manual_backward(self.loss(batch)))

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        optimizer.first_step()
        optimizer_closure()
        optimizer.second_step()

    def configure_optimizers(self):
        if self.how == "plain":
            return torch.optim.SGD(self.parameters(), lr=0.05)
        return SAM(self.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)


def sharpness(how, scheme):
    """The weights of this rank's node, and our warnings."""
    strategy = HierarchicalModelParallelStrategy(scheme, ranks_per_node=2)
    module = Sharpness(how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(strategy).fit(module)
    said = [str(warning.message) for warning in caught if "/lightning_hiercomm/" in warning.filename]
    weights = {name: value.tolist() for name, value in whole_state(module).items()}
    return weights, said, [scheme.state.steps for scheme in strategy.schemes]


SCHEMES = [AllReduce(), PeriodicAveraging(2)]
WAYS = ("closure", "halves", "hook")


@pytest.fixture(scope="module")
def trained(launch):
    """What every rank has to say of each way to train."""
    runs = [*((how, scheme) for scheme in SCHEMES for how in WAYS), ("plain", SCHEMES[0])]
    ranks = launch(lambda _: [sharpness(how, scheme) for how, scheme in runs])
    return {(how, repr(scheme)): [rank[place] for rank in ranks] for place, (how, scheme) in enumerate(runs)}


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@pytest.mark.parametrize("how", WAYS[1:])
def test_sam_in_halves_trains_sharded_modules(trained, scheme, how):
    for (expected, _, _), (weights, said, steps) in zip(
        trained["closure", repr(scheme)], trained[how, repr(scheme)], strict=True
    ):
        assert (said, steps) == ([], [12])
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(weights[name]), torch.tensor(value), msg=name)


def test_gradients_that_nodes_should_share_and_do_not_are_named(trained):
    said = [said for _, said, _ in trained["plain", repr(SCHEMES[0])]]
    assert [len(each) for each in said] == [1, 1, 0, 0]
    assert "ranks 1, 3 should share" in said[1][0]
    assert "call self.manual_backward(loss)" in said[1][0]
