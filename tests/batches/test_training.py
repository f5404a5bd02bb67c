"""Heterogeneous batches through Lightning, over real processes."""

from __future__ import annotations

import time

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from problems import SaveAfter, SaveAfterEpoch, one_trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiercomm import AllReduce, HeterogeneousBatches, HierarchicalStrategy
from lightning_hiercomm.batches import speed
from lightning_hiercomm.batches.partition import StepCost

pytestmark = pytest.mark.pooled


@pytest.fixture
def careless(monkeypatch):
    """Four steps are enough to measure speeds."""
    monkeypatch.setattr(speed, "_BLOCK_SECONDS", 0.0)


@pytest.fixture
def unequal(careless, monkeypatch):
    """Rank 0 counts as four times as fast as rank 1, however busy the machine is."""
    monkeypatch.setattr(speed.SpeedMeasurement, "cost", lambda *_: (StepCost(0.0, 4.0 - 3.0 * dist.get_rank()), 0.0))


def samples(count=48):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)


class Net(pl.LightningModule):
    """``report`` is the size of each batch; ``data`` is what it loads, instead of samples in batches of 4."""

    def __init__(self, *layers, data=None, **loader) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), *layers, torch.nn.Tanh(), torch.nn.Linear(16, 3))
        self.data, self.loader = data, {"batch_size": 4, **loader}
        self.report: list = []

    def training_step(self, batch, batch_idx):
        self.report.append(len(batch[0]))
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(self.data or TensorDataset(*samples()), **self.loader)


def plain_training(total, epochs=1):
    """One process, whole batches, in order: what every division must equal."""
    module = Net()
    optimizer = module.configure_optimizers()
    x, y = samples()
    for _ in range(epochs):
        for start in range(0, len(x) - total + 1, total):
            optimizer.zero_grad()
            module.training_step((x[start : start + total], y[start : start + total]), 0).backward()
            optimizer.step()
    return module.state_dict()


def assert_close(state, expected):
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks_per_node", [[4], [3, 1]])
def test_unequal_ranks_train_as_one_process_with_the_global_batch(fit, ranks_per_node):
    batches = HeterogeneousBatches(13, [4, 3, 1, 1])
    strategy = {"scheme": AllReduce(), "batches": batches, "ranks_per_node": ranks_per_node}
    for rank, report in enumerate(fit(Net(), strategy, max_epochs=2)):
        assert report["report"] == [[6, 4, 2, 1][rank]] * 6
        assert_close(report["state_dict"], plain_training(13, epochs=2))


@pytest.mark.pairwise
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.usefixtures("unequal")
def test_a_run_that_divides_within_an_epoch_trains_as_one_process_would(fit, workers, accumulated):
    arguments = {"max_epochs": 2, "accumulate_grad_batches": accumulated, "devices": 2}
    module = Net(num_workers=workers)
    measured = fit(module, {"scheme": AllReduce(), "batches": HeterogeneousBatches(4)}, **arguments)
    given = fit(Net(), {"scheme": AllReduce(), "batches": HeterogeneousBatches(4, [1, 1])}, **arguments)
    sizes = [report["report"] for report in measured]
    assert {a + b for a, b in zip(*sizes, strict=True)} == {4}
    assert [len(each) for each in sizes] == [24, 24]
    change = sizes[0].index(3)
    assert sizes[0][:change] == [2] * change
    assert 7 <= change < 12  # within the first epoch
    assert change % accumulated == 0
    for report in measured:
        assert_close(report["state_dict"], given[0]["state_dict"])


@pytest.mark.parametrize("step", [3, 11], ids=["while it measures", "after it has divided"])
@pytest.mark.usefixtures("unequal")
def test_a_run_is_resumed_in_the_middle_of_an_epoch(fit, tmp_path, step):
    path = tmp_path / "saved.ckpt"
    strategy = {"scheme": AllReduce(), "batches": HeterogeneousBatches(4), "checkpoint_replicas": True}
    fit(Net(), strategy, devices=2, callbacks=[SaveAfter(step, path)])
    reports = fit(Net(), strategy, devices=2, max_epochs=2, fit_arguments={"ckpt_path": path})
    fast, slow = (report["report"] for report in reports)
    assert {a + b for a, b in zip(fast, slow, strict=True)} == {4}
    assert len(fast) == 24 - step
    assert (fast[0], fast[-1]) == (2 if step == 3 else 3, 3)
    assert torch.equal(*(report["state_dict"]["net.0.weight"] for report in reports))


@pytest.mark.usefixtures("unequal")
def test_manual_optimization_is_divided_at_the_next_epoch(fit):
    class Manual(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    strategy = {"scheme": AllReduce(), "batches": HeterogeneousBatches(4)}
    reports = fit(Manual(), strategy, devices=2, max_epochs=2)
    assert [report["report"] for report in reports] == [[2] * 12 + [3] * 12, [2] * 12 + [1] * 12]


class Sleeping(Net):
    """Takes a quarter of a millisecond per sample; on rank 1, four times as long."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.00025 * len(batch[0]) * (4 if self.global_rank == 1 else 1))
        return super().training_step(batch, batch_idx)


def test_a_slower_rank_gets_fewer_samples(fit, monkeypatch):
    monkeypatch.setattr(speed, "_BLOCK_SECONDS", 0.04)
    module = Sleeping(data=TensorDataset(*samples(32 * 16)))
    reports = fit(module, {"batches": HeterogeneousBatches(32)}, devices=2, max_epochs=4, forked=True)
    slow = reports[1]["report"][-1]
    assert 2 <= slow <= 12
    assert reports[0]["report"][-1] == 32 - slow


def test_logged_means_are_means_over_samples(fit):
    class Logging(Net):
        def training_step(self, batch, batch_idx):
            first = batch[0][:, 0].mean()
            self.log("step", first, on_step=True, on_epoch=False, sync_dist=True)
            self.log("epoch", first, on_step=False, on_epoch=True, sync_dist=True)
            self.log("sum", float(len(batch[0])), on_epoch=True, on_step=False, reduce_fx="sum", sync_dist=True)
            return super().training_step(batch, batch_idx)

    x, _ = samples()
    for report in fit(Logging(), {"batches": HeterogeneousBatches(16, [5, 1, 1, 1])}):
        assert report["metrics"]["step"] == pytest.approx(x[32:48, 0].mean().item(), abs=1e-6)
        assert report["metrics"]["epoch"] == pytest.approx(x[:, 0].mean().item(), abs=1e-6)
        assert report["metrics"]["sum"] == 48


def test_validation_data_are_divided_by_lightning(fit):
    class Validated(Net):
        def validation_step(self, batch, batch_idx):
            self.report.append(-len(batch[0]))

        def val_dataloader(self):
            return DataLoader(TensorDataset(*samples(8)), batch_size=8)

    reports = fit(Validated(), {"batches": HeterogeneousBatches(24, [2, 1])}, devices=2, num_sanity_val_steps=0)
    assert [report["report"] for report in reports] == [[16, 16, -4], [8, 8, -4]]


@pytest.mark.usefixtures("careless")
def test_several_train_dataloaders_are_divided_alike(fit):
    class Two(Net):
        def training_step(self, batch, batch_idx):
            assert len(batch["a"][0]) == len(batch["b"][0])
            return super().training_step(batch["a"], batch_idx)

        def train_dataloader(self):
            return {"a": super().train_dataloader(), "b": super().train_dataloader()}

    reports = fit(Two(), {"batches": HeterogeneousBatches(8, [5, 3])}, devices=2)
    assert [report["report"] for report in reports] == [[5] * 6, [3] * 6]


@pytest.mark.usefixtures("careless")
def test_one_cycle_over_the_estimated_steps_ends_with_the_run(fit):
    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            steps = self.trainer.estimated_stepping_batches  # makes the dataloaders
            self.report.append(steps)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    strategy = {"batches": HeterogeneousBatches(8, [6, 2])}
    reports = fit(Scheduled(num_workers=1), strategy, devices=2, max_epochs=2)
    assert [report["report"] for report in reports] == [[12, *[6] * 12], [12, *[2] * 12]]


def test_a_checkpoint_keeps_the_division(fit, tmp_path):
    path = tmp_path / "last.ckpt"

    fit(Net(), {"batches": HeterogeneousBatches(12, [2, 1])}, devices=2, callbacks=[SaveAfterEpoch(path)])
    saved = torch.load(path, weights_only=True)["hiercomm"]["batches"]
    assert saved == {"sizes": [8, 4], "costs": [[0.0, 0.0], [2.0, 1.0]], "speeds": [2, 1]}
    resumed = {"batches": HeterogeneousBatches(12)}
    reports = fit(Net(), resumed, devices=2, max_epochs=2, fit_arguments={"ckpt_path": path})
    assert [report["report"] for report in reports] == [[8] * 4, [4] * 4]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_takes_its_epochs_in_the_same_order(fit, tmp_path, workers):
    path = tmp_path / "first.ckpt"

    module = Net(shuffle=True, num_workers=workers)
    strategy = {"scheme": AllReduce(), "batches": HeterogeneousBatches(12, [2, 1])}
    whole = fit(module, strategy, devices=2, max_epochs=3, callbacks=[SaveAfterEpoch(path)])
    resumed = fit(module, strategy, devices=2, max_epochs=3, fit_arguments={"ckpt_path": path})
    for name, expected in whole[0]["state_dict"].items():
        assert torch.equal(resumed[0]["state_dict"][name], expected), name


def test_the_size_is_logged(fit):
    def note(trainer, module):
        module.report = {k: v for k, v in trainer.strategy.communication().items() if "batch_size" in k}

    callbacks = [LambdaCallback(on_train_end=note)]
    reports = fit(Net(), {"batches": HeterogeneousBatches(12, [2, 1])}, devices=2, callbacks=callbacks)
    every = {"batch_size/0": 8.0, "batch_size/1": 4.0}
    assert [report["report"] for report in reports] == [{"batch_size": 8.0, **every}, {"batch_size": 4.0, **every}]


@pytest.mark.parametrize(
    "layers",
    [[torch.nn.BatchNorm1d(16)], [torch.nn.Unflatten(1, (16, 1, 1)), torch.nn.BatchNorm2d(16), torch.nn.Flatten()]],
    ids=["vectors", "pooled pictures"],
)  # which refuse a batch of one sample
def test_the_slowest_rank_gets_enough_samples_for_batch_norm(fit, layers):
    reports = fit(Net(*layers), {"batches": HeterogeneousBatches(12, [100, 1])}, devices=2)
    assert [report["report"] for report in reports] == [[10] * 4, [2] * 4]


def test_one_process_takes_the_global_batch(fit):
    (report,) = fit(Net(), {"batches": HeterogeneousBatches(12), "ranks_per_node": 1}, devices=1)
    assert report["report"] == [12] * 4


def test_a_loader_that_cannot_be_divided_is_refused_before_training(fit):
    with pytest.raises(Exception, match="the dataset makes the batches"):
        fit(Net(batch_size=None), {"batches": HeterogeneousBatches(12, [2, 1])}, devices=2, forked=True)


def test_dataloaders_are_not_made_before_there_is_a_division(tmp_path):
    class Early(Net):
        def setup(self, stage):
            self.steps = self.trainer.estimated_stepping_batches  # makes the dataloaders

    trainer = one_trainer(tmp_path, strategy=HierarchicalStrategy(batches=HeterogeneousBatches(4)))
    with pytest.raises(RuntimeError, match="no division of batches yet"):
        trainer.fit(Early())
