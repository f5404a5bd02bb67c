"""A resume restores what callbacks average, losses, scales and random streams of each rank."""

from __future__ import annotations

from functools import partial

import lightning.pytorch as pl
import numpy
import pytest
import torch
from fits import whole_and_resumed
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from problems import SaveAfter
from sidecar_cases import STEPS, Net, schemes
from torch.utils.data import DataLoader

from lightning_hiercomm import DASO, PeriodicAveraging, Plateau

pytestmark = pytest.mark.pooled


class Tells(pl.Callback):
    """Reports what the average holds after every batch; each rank its own."""

    def __init__(self, average: EMAWeightAveraging) -> None:
        self.of = average

    def on_train_batch_end(self, trainer, pl_module, *_):
        model = self.of._average_model.module
        state = torch.cat([value.flatten().double() for value in (*model.parameters(), *model.buffers())])
        pl_module.report.append(state.tolist())


def _callbacks():
    average = EMAWeightAveraging(decay=0.7)
    return [average, Tells(average)]


def _resumed_with_averages(folder):
    reports = []
    for scheme in (PeriodicAveraging(5, at_epoch_end=False), schemes()["diloco_int4"], schemes()["gossip_overlap"]):
        arguments = {"callbacks": _callbacks, "limit_train_batches": STEPS}
        whole, resumed = whole_and_resumed(folder, Net, scheme, after=STEPS, **arguments)
        ends = [[value.tolist() for value in module.state_dict().values()] for module in (whole, resumed)]
        reports.append((whole.report, resumed.report, ends))
    return reports


def test_weight_averaging_goes_on_with_each_ranks_own_average(borrow):
    for one, other in zip(*borrow(_resumed_with_averages, ranks=2), strict=True):
        assert one[0][: 2 * STEPS] != other[0][: 2 * STEPS], "nodes differ"
        for whole, resumed, ends in (one, other):
            assert len(resumed) == STEPS * 2  # after every batch the module reports, and a callback
            assert resumed == whole[-len(resumed) :]
            assert ends[0] == ends[1]


LOSSES = [[4.0, 4.0, 4.0, 4.0], [9.0, 9.0, 1.0, 1.0], [4.0, 4.0, 4.0, 4.0]]
"""The second epoch's is no improvement, but that of its last two batches would be one."""


class Noisy(pl.LightningModule):
    """Moves by NumPy's noise and reports losses of the test's own; the gradients of node 0 overflow once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)
        self.report: list[tuple[int, float, float]] = []

    def on_fit_start(self) -> None:
        numpy.random.seed(self.global_rank)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        value = self.layer(batch).sum() * numpy.random.rand()
        return value - value.detach() + LOSSES[self.current_epoch][batch_idx]

    def on_after_backward(self) -> None:
        if self.current_epoch == 0 and self.global_rank < 2 and self.trainer.fit_loop.batch_idx == 1:
            self.layer.weight.grad.fill_(torch.inf)

    def on_train_batch_end(self, *_: object) -> None:
        scale = self.trainer.precision_plugin.scaler.get_scale()
        self.report.append((self.trainer.strategy.schemes[0].period, self.layer.weight.item(), scale))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(16, 1))


@pytest.mark.parametrize("replicas", [True, False], ids=["sidecars", "plain checkpoint"])
def test_the_loss_so_far_the_scale_and_numpys_stream_go_on(fit, tmp_path, replicas):
    path = tmp_path / "saved.ckpt"
    strategy = {"scheme": DASO(4, 1, 0, 0, plateau=Plateau(0, 0.0)), "checkpoint_replicas": replicas}

    def run(**arguments):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        return fit(Noisy(), strategy, max_epochs=3, plugins=plugins, **arguments)

    whole, again = run(callbacks=[SaveAfter(6, path)]), run(fit_arguments={"ckpt_path": path})
    for rank, (one, other) in enumerate(zip(whole, again, strict=True)):
        periods, _, scales = zip(*one["report"], strict=True)
        assert periods == (4,) * 7 + (2,) * 4 + (1,)
        assert scales[-1] == (512.0 if rank < 2 else 1024.0)
        if replicas:
            assert other["report"] == one["report"][6:]
        assert [period for period, _, _ in other["report"]] == [4, 2, 2, 2, 2, 1]


class Drawing(Net):
    """Batches that its own process draws, and changes by chance before they go to the device."""

    def __init__(self, shuffle: bool) -> None:
        super().__init__()
        self.shuffle = shuffle

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [torch.randn(5), torch.tensor(index % 2)]

    def on_before_batch_transfer(self, batch: list[torch.Tensor], dataloader_idx: int) -> list[torch.Tensor]:
        return [batch[0] + torch.randn_like(batch[0]), torch.randint(2, (len(batch[1]),))]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self, batch_size=2, shuffle=self.shuffle)


@pytest.mark.parametrize("shuffle", [False, True])
def test_random_numbers_go_on_after_a_resume_in_mid_epoch(tmp_path, shuffle):
    arguments = {"devices": 1, "max_epochs": 1, "use_distributed_sampler": False}
    whole, resumed = whole_and_resumed(tmp_path, partial(Drawing, shuffle), after=2, **arguments)
    assert len(whole.report) == STEPS
    assert resumed.report == whole.report[2:]
