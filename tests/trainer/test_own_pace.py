"""Nodes that synchronize by the clock, in real processes: one of them is slowed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from problems import SaveAfter, Stream
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiercomm import (
    DiLoCo,
    EverySeconds,
    Health,
    HeterogeneousBatches,
    HierarchicalFabricStrategy,
    HierarchicalModelParallelStrategy,
    HierarchicalStrategy,
    ParameterSync,
    PeriodicAveraging,
    Ring,
    UnequalData,
)
from lightning_hiercomm.trainer.own_pace import check_trainer

BATCH = 2
SECONDS = 0.15  # a loaded machine takes many steps in it, and a slowed rank about three
SLOW = 0.05
SCHEMES = [PeriodicAveraging(EverySeconds(SECONDS)), DiLoCo(EverySeconds(SECONDS), fragments=2)]


class Paced(pl.LightningModule):
    """Minimises (x - a)^2 over numbers a; ``report`` has what it has seen and done.

    Args:
        samples: The number of samples of all nodes, or of each if they have data of their own.
        slow: Seconds that each rank sleeps in a step.
        workers: Of the dataloader.
    """

    def __init__(self, samples: int | Sequence[int] = 120, slow: Sequence[float] = (0.0, SLOW), workers: int = 0):
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.y = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.samples, self.slow, self.workers = samples, slow, workers
        self.report: Any = {"seen": [], "validated": [], "x": []}

    def on_train_epoch_start(self) -> None:
        self.report["seen"].append([])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.slow[self.global_rank])
        if not self.report["seen"]:
            self.report["seen"].append([])
        self.report["seen"][-1] += batch[0].tolist()
        self.log("loss", batch[0].mean(), on_step=False, on_epoch=True, sync_dist=True)
        return (self.x + self.y - batch[0] / 100).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pace = self.trainer.strategy.schemes[0].pace
        exchanges = 0 if pace is None else pace.exchanges
        self.report["validated"].append((self.trainer.global_step, exchanges, self.x.item(), self.y.item()))
        self.log("x", self.x.detach(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)

    def train_dataloader(self) -> Any:
        if isinstance(self.samples, int):
            numbers = torch.arange(self.samples, dtype=torch.float64)
            return DataLoader(TensorDataset(numbers), BATCH, shuffle=True, num_workers=self.workers)
        first = sum(self.samples[: self.global_rank])
        numbers = torch.arange(first, first + self.samples[self.global_rank], dtype=torch.float64)
        return DataLoader(Stream([(number,) for number in numbers]), BATCH)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(1)))


def fit_paced(fit: Any, module: Paced, scheme: Any, **chosen: Any) -> Any:
    own = {name: chosen.pop(name) for name in ("ranks_per_node", "unequal_data", "health") if name in chosen}
    strategy = {"scheme": scheme, "ranks_per_node": 1, "health": Health(hang_timeout=10.0), **own}
    return fit(module, strategy, **{"devices": len(module.slow), "num_sanity_val_steps": 0, **chosen})


def check_ends(reports: Sequence[Any]) -> None:
    """Check that all ranks end with one model, after validating the same models at the same exchanges."""
    for name in ("x", "y"):
        assert len({report["state_dict"][name].item() for report in reports}) == 1
    assert len({tuple(report["report"]["validated"]) for report in reports}) == 1


@pytest.mark.pooled
@pytest.mark.parametrize("scheme", SCHEMES, ids=["periodic", "diloco"])
def test_nodes_claim_every_sample_once(fit, scheme):
    reports = fit_paced(fit, Paced(), scheme, max_epochs=2)
    check_ends(reports)
    for epoch in (0, 1):
        seen = [report["report"]["seen"][epoch] for report in reports]
        assert sorted(seen[0] + seen[1]) == list(range(120))
        assert len(seen[0]) > len(seen[1]) >= BATCH
    assert len(reports[0]["report"]["validated"]) == 2


@pytest.mark.pooled
def test_ranks_of_a_node_claim_batches_together(fit):
    module = Paced(samples=90, slow=(0.0, 0.0, SLOW), workers=1)
    reports = fit_paced(fit, module, PeriodicAveraging(EverySeconds(SECONDS)), ranks_per_node=[2, 1], max_epochs=1)
    check_ends(reports)
    seen = [report["report"]["seen"][0] for report in reports]
    assert len(seen[0]) == len(seen[1]) > len(seen[2])
    everything = [*seen[0], *seen[1], *seen[2]]
    assert set(everything) == set(range(90))
    assert len(everything) - 90 in (0, BATCH)  # the last rank of a node that claims past the end


@pytest.mark.pooled
@pytest.mark.parametrize("scheme", [pytest.param(SCHEMES[0], marks=pytest.mark.nightly), SCHEMES[1]])
def test_nodes_with_data_of_their_own_use_all_of_it(fit, scheme):
    module = Paced(samples=(90, 30), slow=(0.0, 0.002))
    reports = fit_paced(
        fit,
        module,
        scheme,
        max_epochs=2,
        use_distributed_sampler=False,
        accumulate_grad_batches=2,
        unequal_data=UnequalData(mean="normalized"),
    )
    check_ends(reports)
    expected = [list(range(90)), list(range(90, 120))]
    assert [report["report"]["seen"] for report in reports] == [[own] * 2 for own in expected]
    assert [report["metrics"]["loss"] for report in reports] == [pytest.approx(59.5)] * 2


class Scheduled(Paced):
    """Has a schedule that fails past its end."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.schedule = OneCycleLR(optimizer, 0.02, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.report.setdefault("scheduled", []).append(self.schedule.last_epoch)

    def on_train_end(self) -> None:
        self.report["scheduled"].append(self.schedule.last_epoch)


@pytest.mark.pooled
def test_max_steps_and_schedules_follow_the_mean_of_the_nodes_steps(fit):
    module = Scheduled(samples=10**5)
    reports = fit_paced(fit, module, PeriodicAveraging(EverySeconds(SECONDS)), max_epochs=-1, max_steps=50)
    check_ends(reports)
    ((step, *_),) = reports[0]["report"]["validated"]
    taken = [len(report["report"]["seen"][0]) // BATCH for report in reports]
    assert 50 <= step == sum(taken) // 2
    assert taken[0] > 50 > taken[1]
    scheduled = [report["report"]["scheduled"] for report in reports]
    assert scheduled[0][-1] == 50
    assert list(dict.fromkeys(scheduled[0])) == list(dict.fromkeys(scheduled[1]))


class StopsAlone(Paced):
    """The second rank asks to stop at its third batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 2:
            self.trainer.should_stop = True


@pytest.mark.pooled
def test_all_nodes_stop_at_the_exchange_after_one_asked_to(fit):
    reports = fit_paced(
        fit, StopsAlone(samples=10**5), PeriodicAveraging(EverySeconds(SECONDS)), max_epochs=5, min_epochs=0
    )
    check_ends(reports)
    assert len(reports[1]["report"]["seen"][0]) == 3 * BATCH
    assert len(reports[0]["report"]["seen"]) == 1


@pytest.mark.pooled
def test_resume_continues_from_the_end_of_an_epoch(fit, tmp_path):
    saving = ModelCheckpoint(tmp_path, save_top_k=-1)
    scheme = DiLoCo(EverySeconds(SECONDS), fragments=2)
    first = fit_paced(fit, Paced(), scheme, max_epochs=1, callbacks=[saving], enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")
    assert path.name == f"epoch=0-step={first[0]['report']['validated'][0][0]}.ckpt"
    reports = fit_paced(fit, Paced(), scheme, max_epochs=3, fit_arguments={"ckpt_path": path})
    check_ends(reports)
    for epoch in (0, 1):
        seen = [report["report"]["seen"][epoch] for report in reports]
        assert sorted(seen[0] + seen[1]) == list(range(120))
    assert reports[0]["report"]["validated"][0][0] > first[0]["report"]["validated"][0][0]
    orders = [each["report"]["seen"][0] for each in (first[1], reports[1])]
    assert orders[0] != orders[1][: len(orders[0])]  # the order of the second epoch


# ---- refused -------------------------------------------------------------------------------------------------------


class Saves(Paced):
    """Saves within an epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.save_checkpoint("unused.ckpt")


class Freezes(Paced):
    """Freezes a parameter within an epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.y.requires_grad_(batch_idx < 2)


class HasTwoOptimizers(Paced):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter]) for parameter in self.parameters()]


CLOCK = PeriodicAveraging(EverySeconds(SECONDS))


@pytest.mark.parametrize(
    ("module", "scheme", "chosen", "message"),
    [
        (Saves(), CLOCK, {}, "a checkpoint within an epoch cannot be saved"),
        pytest.param(Freezes(), CLOCK, {}, "frozen or unfrozen within an epoch", marks=pytest.mark.nightly),
        pytest.param(HasTwoOptimizers(), CLOCK, {}, "configure_optimizers returned 2", marks=pytest.mark.nightly),
        (Paced(), PeriodicAveraging(EverySeconds(1800)), {}, "waits in an exchange for longer than timeout=1800 s"),
        (
            Paced(samples=(8, 0)),
            CLOCK,
            {"use_distributed_sampler": False},
            "ends an epoch without a last batch: its dataloader has no batch",
        ),
    ],
)
def test_programs_that_would_hang_are_refused(fit, module, scheme, chosen, message):
    with pytest.raises(Exception, match=f"EverySeconds.*: .*{message}"):
        fit_paced(fit, module, scheme, max_epochs=1, **chosen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"val_check_interval": 5}, "val_check_interval=5.* validates within epochs"),
        ({"val_check_interval": 1}, "val_check_interval=1.* validates within epochs"),
        ({"max_time": "00:01:00:00"}, "Timer, or Trainer.*use max_steps or max_epochs"),
        ({"callbacks": [ModelCheckpoint(every_n_train_steps=5)]}, "save within epochs"),
        ({"callbacks": [ModelCheckpoint(train_time_interval=timedelta(hours=1))]}, "save within epochs"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging trains steps"),
    ],
)
def test_settings_that_act_at_batches_are_refused(arguments, message):
    check_trainer(pl.Trainer(accelerator="cpu", logger=False))
    with pytest.raises(ValueError, match=f"EverySeconds: .*{message}"):
        check_trainer(pl.Trainer(accelerator="cpu", logger=False, **arguments))


@pytest.mark.nightly
def test_checkpoint_from_within_an_epoch_is_refused(fit, tmp_path):
    saving = SaveAfter(7, tmp_path / "within.ckpt")
    fit_paced(fit, Paced(slow=(0.0, 0.0)), PeriodicAveraging(3), callbacks=[saving])
    with pytest.raises(Exception, match="EverySeconds: the checkpoint was saved within an epoch"):
        fit_paced(fit, Paced(), CLOCK, max_epochs=3, fit_arguments={"ckpt_path": tmp_path / "within.ckpt"})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: HierarchicalStrategy(DiLoCo(EverySeconds(1), staleness=1)), "EverySeconds: staleness=1"),
        (lambda: HierarchicalStrategy(DiLoCo(EverySeconds(1), warmup_steps=9)), "EverySeconds: warmup_steps=9"),
        (lambda: HierarchicalStrategy(PeriodicAveraging(EverySeconds(1), gradients="none")), "gradients='none'"),
        (lambda: HierarchicalStrategy(PeriodicAveraging(EverySeconds(1), order="before_step")), "order='before_step'"),
        (lambda: HierarchicalStrategy(ParameterSync(EverySeconds(1), reducer=Ring())), "EverySeconds: .* with a graph"),
        (lambda: HierarchicalStrategy(CLOCK, elastic="host:1"), "elastic"),
        (lambda: HierarchicalStrategy(CLOCK, batches=HeterogeneousBatches(8)), "HeterogeneousBatches divides"),
        (lambda: HierarchicalFabricStrategy(CLOCK), "nodes take unequal numbers of steps, and .* needs a Trainer"),
        (lambda: HierarchicalModelParallelStrategy(CLOCK), "nodes take unequal numbers of steps, and .* whole"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_samples_are_counted_by_default():
    assert "unequal_data=UnequalData(samples=None)" in repr(HierarchicalStrategy(CLOCK))
    chosen = HierarchicalStrategy(CLOCK, unequal_data=UnequalData(mean="normalized"))
    assert "mean='normalized'" in repr(chosen)
