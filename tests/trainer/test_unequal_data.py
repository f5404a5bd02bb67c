"""Nodes with unequal numbers of batches, against a calculation in plain Python."""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from fits import outcome
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from problems import Manual, SaveAfter, one_trainer
from torch import Tensor
from torch.utils.data import DataLoader
from trainer.uneven import BATCH, LR, Uneven, calculated, each_sample_once, ends_of, fit_uneven, numbers_of

from lightning_hiercomm import AllReduce, DiLoCo, Health, HierarchicalStrategy, PeriodicAveraging

pooled = pytest.mark.pooled
ISSUE = (100, 70, 31)
"""Batches of the three nodes, as the issue has them."""
SCHEMES = [AllReduce(), PeriodicAveraging(10), DiLoCo(10)]


@pytest.mark.pairwise
@pooled
@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_nodes_with_100_70_and_31_batches_train(fit, scheme, kind):
    reports = fit_uneven(fit, Uneven(ISSUE, kind), scheme, max_epochs=2)
    each_sample_once(reports, ISSUE, epochs=2)
    assert ends_of(reports) == pytest.approx(calculated(scheme, ISSUE, epochs=2), rel=1e-12)
    validated = [report["report"]["validated"] for report in reports]
    assert validated[0] == validated[1] == validated[2]  # the averaged model
    assert len(validated[0]) == 2
    metrics = [report["metrics"]["mean_sample"] for report in reports]
    everything = torch.cat([numbers_of(rank, own) for rank, own in enumerate(ISSUE)])
    assert metrics == [pytest.approx(everything.mean().item(), rel=1e-5)] * 3


def of_five(scheme: Any, batches: Sequence[int]) -> float:
    return calculated(scheme, [min(5, own) for own in batches])


BY_FOUR, LAST_WINDOWS = {"accumulate_grad_batches": 4}, (22, 13, 7)  # whose last windows have 2, 1 and 3 batches


@pooled
@pytest.mark.parametrize(
    ("batches", "kind", "scheme", "arguments", "expected"),
    [
        *(
            (LAST_WINDOWS, kind, scheme, BY_FOUR, partial(calculated, accumulate=4))
            for scheme, kind in ((AllReduce(), "map"), (PeriodicAveraging(3), "stream"), (DiLoCo(3), "map"))
        ),
        ((12, 6, 3), "combined", PeriodicAveraging(2), {"limit_train_batches": 5}, of_five),
    ],
)
def test_a_run_ends_as_calculated(fit, batches, kind, scheme, arguments, expected):
    reports = fit_uneven(fit, Uneven(batches, kind), scheme, **arguments)
    used = [min(arguments.get("limit_train_batches", own), own) for own in batches]
    assert [len(report["report"]["seen"][0]) for report in reports] == [BATCH * own for own in used]
    if "limit_train_batches" not in arguments:
        each_sample_once(reports, batches)
    assert ends_of(reports) == pytest.approx(expected(scheme, batches), rel=1e-12)


class KeepsGradients(Uneven):
    """Sets gradients to zero, which an optimizer with momentum would use."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


@pooled
def test_idle_node_keeps_momentum_and_parameters(fit):
    first, last = fit_uneven(fit, KeepsGradients((12, 3), momentum=0.9), PeriodicAveraging(6))
    assert last["report"]["idle"] == [False] * 3 + [True] * 9
    assert not any(first["report"]["idle"])
    assert len({*last["report"]["x"][2:5]}) == 1
    assert len({*last["report"]["x"][5:11]}) == 1


@pytest.mark.pairwise
@pooled
@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(4), DiLoCo(4)], ids=repr)
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_run_ends_by_max_steps_and_validates_within_epochs(fit, scheme, kind):
    reports = fit_uneven(
        fit, Uneven((11, 5), kind), scheme, max_epochs=5, max_steps=19, val_check_interval=3, limit_val_batches=1
    )
    validated = [report["report"]["validated"] for report in reports]
    assert validated[0] == validated[1]
    epoch = 12 if kind == "stream" and not isinstance(scheme, AllReduce) else 11  # ends with a synchronization
    steps = [step for step in range(1, 20) if (step % epoch or epoch) % 3 == 0]
    assert [step for step, _ in validated[0]] == steps
    ends_of(reports)


@pooled
def test_run_stops_early_on_all_nodes(fit):
    at_second_validation = EarlyStopping("x", patience=1, mode="max", min_delta=1e9)
    arguments = {"max_epochs": 9, "val_check_interval": 4, "callbacks": [at_second_validation]}
    reports = fit_uneven(fit, Uneven((11, 5)), PeriodicAveraging(4), **arguments)
    assert len({len(report["report"]["x"]) for report in reports}) == 1
    assert len(reports[0]["report"]["x"]) < 99
    ends_of(reports)


@pooled
def test_one_cycle_over_the_estimated_steps_ends_with_the_longest_node(fit):
    class Scheduled(Uneven):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=LR)
            self.report["steps"] = self.trainer.estimated_stepping_batches
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=self.report["steps"])
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    reports = fit_uneven(fit, Scheduled((11, 5)), PeriodicAveraging(4), max_epochs=2)
    assert [(report["report"]["steps"], len(report["report"]["x"])) for report in reports] == [(22, 22)] * 2


@pytest.mark.pairwise
@pooled
@pytest.mark.parametrize("step", [5, 14, 33])  # within a period; where one node idles; in the second epoch
@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(4), DiLoCo(4)], ids=repr)
def test_resume_within_an_epoch_is_exact(fit, tmp_path, scheme, step):
    path, batches = tmp_path / "saved.ckpt", (20, 12, 7)

    def run(**chosen: Any) -> Any:
        module = Uneven(batches, "resumable", momentum=0.9)
        return fit_uneven(fit, module, scheme, checkpoint_replicas=True, max_epochs=2, **chosen)

    whole = run(callbacks=[SaveAfter(step, path)])
    resumed = run(fit_arguments={"ckpt_path": path})
    assert ends_of(resumed) == ends_of(whole)
    for before, after in zip(whole, resumed, strict=True):
        assert before["report"]["x"][step:] == after["report"]["x"]


@pooled
def test_logged_tokens_weigh_nodes(fit):
    reports = fit_uneven(fit, Uneven((4, 4), tokens=True), PeriodicAveraging(None), unequal_data="tokens")
    ends = []
    for rank in (0, 1):
        x = 0.0
        for batch in numbers_of(rank, 4).split(BATCH):
            x -= LR * (x - batch.mean().item())
        ends.append(x)
    assert ends_of(reports) == pytest.approx((ends[0] + 3 * ends[1]) / 4, rel=1e-12)


class Normalized(Uneven):
    """Has a BatchNorm layer, whose buffers DDP broadcasts before forward passes."""

    def __init__(self, batches: Sequence[int]) -> None:
        super().__init__(batches)
        self.norm = torch.nn.BatchNorm1d(1, affine=False).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.norm(batch[:, None])
        return super().training_step(batch, batch_idx)


@pooled
@pytest.mark.parametrize(
    ("scheme", "accumulated", "batches"), [(AllReduce(), 1, (9, 4)), (PeriodicAveraging(3), 2, (4, 9))]
)
def test_statistics_of_batch_norm_end_equal(fit, scheme, accumulated, batches):
    each = tuple(own for own in batches for _ in (0, 1))
    reports = fit_uneven(
        fit, Normalized(each), scheme, ranks_per_node=2, accumulate_grad_batches=accumulated, max_epochs=2
    )
    ends_of(reports)
    (mean,) = {report["state_dict"]["norm.running_mean"].item() for report in reports}
    assert 0 < mean < 4


class Slow(Uneven):
    """The first node takes long for a batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == 0:
            time.sleep(0.25)
        return super().training_step(batch, batch_idx)


def test_waiting_for_a_slow_node_is_no_hang(fit):
    ends_of(fit_uneven(fit, Slow((12, 2)), PeriodicAveraging(None), health=Health(hang_timeout=1.0)))


@pooled
def test_checkpoints_of_a_callback_are_written_on_all_nodes(fit, tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    fit_uneven(fit, Uneven((11, 5)), PeriodicAveraging(3), callbacks=[saving], enable_checkpointing=True)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=4.ckpt", "step=8.ckpt"]


class LogsAtSteps(Uneven):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("now", batch.mean(), on_step=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


class OfObjects(Uneven):
    def train_dataloader(self) -> Any:
        return DataLoader([None] * self.batches[self.global_rank], collate_fn=lambda _: object())


class WithLBFGS(Uneven):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Unsized(Uneven):
    """Only the first rank's loader has a length."""

    def train_dataloader(self) -> Any:
        self.kind = "map" if self.global_rank == 0 else "stream"
        return super().train_dataloader()


class ManualUneven(Manual):
    batches = (4, 4)


@pytest.mark.parametrize(
    ("module", "chosen", "message"),
    [
        (LogsAtSteps((4, 2)), {}, "sync_dist=True.* in training_step waits for all ranks"),
        (OfObjects((4, 2)), {}, r"number of samples of a batch \(object\) is unknown"),
        (Uneven((4, 2)), {"unequal_data": "tokens"}, r"needs self.log\('tokens', ...\)"),
        (WithLBFGS((4, 2)), {}, "LBFGS evaluates the loss several times"),
        (ManualUneven(), {}, "manual optimization"),
        (Unsized((4, 2)), {}, r"dataloaders of ranks \[1\] have no length"),
        (Uneven((4, 2)), {"use_distributed_sampler": True}, r"these have \[8, 4\] samples"),
        (
            Uneven((4, 2)),
            {"scheme": AllReduce(), "find_unused_parameters": True},
            "find_unused_parameters=True needs a backward pass on every rank",
        ),
        (
            Uneven((4, 2)),
            {"unequal_data": False},
            r"unequal lengths: \[4, 2\] .*HierarchicalStrategy\(unequal_data=True\)",
        ),
    ],
)
def test_programs_that_would_hang_are_refused(borrow, module, chosen, message):
    settings = {"scheme": PeriodicAveraging(2), "unequal_data": True, "use_distributed_sampler": False, **chosen}
    for error, _, _ in borrow(lambda folder: outcome(folder, module, **settings), ranks=2):
        assert re.search(message, error)
        assert ("unequal_data: " in error) == (settings["unequal_data"] is not False)


def test_one_process_trains_alone(tmp_path):
    module = Uneven((5,))
    trainer = one_trainer(tmp_path, strategy=HierarchicalStrategy(unequal_data=True), use_distributed_sampler=False)
    trainer.fit(module)
    again = pickle.loads(pickle.dumps(trainer))
    assert type(again.fit_loop._combined_loader) is CombinedLoader  # noqa: SLF001
    assert module.x.item() == pytest.approx(calculated(AllReduce(), (5,), epochs=2), rel=1e-12)
