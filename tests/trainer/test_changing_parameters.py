"""Parameters that come, are replaced, frozen or unfrozen while a Trainer runs, or between its fits."""

from __future__ import annotations

import pytest
import torch
from fits import whole_and_resumed
from problems import Oracle

from lightning_hiercomm import AllReduce, PeriodicAveraging

pytestmark = pytest.mark.pooled


@pytest.mark.parametrize("how", ["added", "replaced"])
def test_parameters_that_come_in_mid_run_get_the_mean_of_all_gradients(fit, how):
    class Growing(Oracle):
        def training_step(self, batch, batch_idx):
            return 0.5 * sum((value - self.global_rank).square().sum() for value in self.parameters())

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                new = torch.nn.Parameter(torch.full((1,), 8.0))
                if how == "added":
                    self.y = new
                    self.optimizers().add_param_group({"params": [new], "lr": 0.5})
                else:
                    self.x = new
                    self.optimizers().param_groups[0]["params"] = [new]

        def on_train_batch_end(self, *_):
            self.report.append([value.item() for value in self.parameters()])

    reports = fit(Growing(6), {"scheme": AllReduce()})
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
