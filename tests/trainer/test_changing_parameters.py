"""Parameters that come, are replaced, frozen or unfrozen while a Trainer runs, or between its fits."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from fits import whole_and_resumed
from problems import Oracle, one_trainer, same_bits
from torch.utils.data import DataLoader

from lightning_hiercomm import AllReduce, HierarchicalStrategy, PeriodicAveraging

pytestmark = pytest.mark.pooled


@pytest.mark.parametrize("how", ["added", "replaced"])
def test_parameters_that_come_in_mid_run_get_the_mean_of_all_gradients(fit, how):
    class Growing(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.values = torch.nn.ParameterList([torch.zeros(1)])
            self.report = []

        def training_step(self, batch, batch_idx):
            return 0.5 * sum((value - self.global_rank).square().sum() for value in self.values)

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                new = torch.nn.Parameter(torch.full((1,), 8.0))
                if how == "added":
                    self.values.append(new)
                    self.optimizers().add_param_group({"params": [new], "lr": 0.5})
                else:
                    self.values[0] = new
                    self.optimizers().param_groups[0]["params"] = [new]

        def on_train_batch_end(self, *_):
            self.report.append([value.item() for value in self.values])

        def train_dataloader(self):
            return DataLoader(torch.zeros(6, 1))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    reports = fit(Growing(), {"scheme": AllReduce(), "ranks_per_node": 2}, max_epochs=1, use_distributed_sampler=False)
    old, new, expected = 0.0, 8.0, []
    for step in range(6):  # the mean of all ranks' targets is 1.5
        old = old - 0.5 * (old - 1.5)
        if step >= 2:
            new = new - 0.5 * (new - 1.5)
        expected.append([old] if step < 2 else [old, new] if how == "added" else [new])
    assert [report["report"] for report in reports] == [expected] * 4


class Teaching(Oracle):
    """A frozen teacher, which a hook fills when training starts; again when it is resumed."""

    def __init__(self):
        super().__init__(6, momentum=0.9)
        self.teacher = torch.nn.Parameter(torch.zeros(3), requires_grad=False)

    def on_train_start(self):
        with torch.no_grad():
            self.teacher.fill_(self.global_rank + 1.0)


def _taught_and_resumed(folder):
    modules = whole_and_resumed(folder, Teaching, PeriodicAveraging(100, at_epoch_end=False), after=6)
    return [(module.teacher[0].item(), [p.tolist() for p in module.parameters()]) for module in modules]


def test_a_teacher_filled_at_train_start_leaves_parameters_unchanged(borrow):
    for (filled, whole), (again, resumed) in borrow(_taught_and_resumed, ranks=2):
        assert filled == again == 1.0  # rank 0's
        assert resumed == whole


class Toggling(pl.LightningModule):
    """Trains two parts in turns, the second one frozen for the first, as when a batch begins; a third unfreezes."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second, self.third = (torch.nn.Linear(1, 1) for _ in range(3))
        for part in self.children():
            torch.nn.init.ones_(part.weight)
            torch.nn.init.zeros_(part.bias)
        self.third.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.third.requires_grad_(True)

    def training_step(self, batch, batch_idx):
        of_first, of_second = self.optimizers()
        x = torch.full((1, 1), 1.0 + self.global_rank)
        self.second.requires_grad_(True)
        of_second.zero_grad()
        self.manual_backward((self.second(self.first(self.third(x)).detach()) - self.global_rank).square().sum())
        of_second.step()
        self.second.requires_grad_(False)
        of_first.zero_grad()
        self.manual_backward((self.second(self.first(self.third(x))) - 1.0).square().sum())
        of_first.step()

    def train_dataloader(self):
        return DataLoader(torch.zeros(5, 1))

    def configure_optimizers(self):
        first = [*self.first.parameters(), *self.third.parameters()]
        return torch.optim.SGD(first, lr=0.01), torch.optim.SGD(self.second.parameters(), lr=0.01)


def test_toggled_parameters_are_still_reduced_after_an_unfreeze(fit):
    strategy = {"scheme": AllReduce(), "find_unused_parameters": True}
    same_bits(fit(Toggling(), strategy, devices=2, max_epochs=1, use_distributed_sampler=False))


class Growing(pl.LightningModule):
    """Trains a parameter that is no part of it, and, from the middle of the second batch on, one more that is."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first = torch.nn.Parameter(torch.zeros(1))
        self.apart = [torch.nn.Parameter(torch.zeros(1))]
        self.report = []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        parameters = [*self.parameters(), *self.apart]
        self.manual_backward(sum((each - self.global_rank).square().sum() for each in parameters))
        optimizer.step()
        if batch_idx == 1:
            self.late = torch.nn.Parameter(torch.zeros(1))
            optimizer.add_param_group({"params": [self.late]})
            optimizer.step()
        self.report.append([each.item() for each in self.parameters()])

    def configure_optimizers(self):
        return torch.optim.SGD([self.first, *self.apart], lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.zeros(12, 1))


def _wrapped_while_growing(folder):
    strategy, wrapped = HierarchicalStrategy(PeriodicAveraging(100), ranks_per_node=2), []
    wrap = strategy._wrap_in_ddp  # noqa: SLF001
    strategy._wrap_in_ddp = lambda: (wrapped.append(1), wrap())  # noqa: SLF001
    module = Growing()
    one_trainer(folder, devices=2, strategy=strategy, max_epochs=1).fit(module)
    return len(wrapped), module.report


def test_ddp_is_made_again_when_parameters_come_and_not_before_every_batch(borrow):
    (times, report), (_, other) = borrow(_wrapped_while_growing, ranks=2)
    assert len(report) == 6
    assert times == 3  # at first, for the one that is apart, and for the late one
    assert report == other


def _frozen_between_fits(folder):
    strategy = HierarchicalStrategy(AllReduce(), ranks_per_node=2, find_unused_parameters=True)
    reduced, reduce = [], strategy._reduce_bucket  # noqa: SLF001
    strategy._reduce_bucket = lambda bucket: (reduced.append(bucket.buffer().numel()), reduce(bucket))[1]  # noqa: SLF001
    trainer, module = one_trainer(folder, devices=2, strategy=strategy, max_epochs=1), Oracle(steps=1)
    module.unused = torch.nn.Parameter(torch.zeros(10))
    for _ in range(2):
        trainer.fit(module)
        module.unused.requires_grad_(False)
        trainer.fit_loop.max_epochs += 1
    return reduced


def test_parameters_frozen_between_fits_are_not_reduced(borrow):
    assert borrow(_frozen_between_fits, ranks=2) == [[11, 1]] * 2
