"""Nodes with unequal numbers of batches, against a calculation in plain Python."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import on_ranks
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from pairwise import on_push
from problems import Manual, SaveAfter, Stream, one_trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hiercomm import AllReduce, DiLoCo, Health, HierarchicalStrategy, PeriodicAveraging, UnequalData
from lightning_hiercomm.trainer.unequal_data import IdlingLoader

ISSUE = (100, 70, 31)
"""Batches of the three nodes, as the issue has them."""
LR = 0.125
BATCH = 2


class Resumable:
    """A loader that continues where a checkpoint left it."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.batches, self.begun, self.skip = batches, 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        self.begun, self.skip = self.skip, 0
        while self.begun < len(self.batches):
            self.begun += 1
            yield self.batches[self.begun - 1]

    def state_dict(self) -> dict[str, int]:
        return {"begun": self.begun}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["begun"]


def numbers_of(rank: int, batches: int) -> Tensor:
    """Return the samples of a rank: all samples of all ranks are different."""
    generator = torch.Generator().manual_seed(rank)
    return rank + torch.rand(batches * BATCH, generator=generator, dtype=torch.float64)


class Uneven(pl.LightningModule):
    """Minimises 0.5 (x - a)^2 over the samples a; ``report`` has what it has seen in each epoch.

    Args:
        batches: The number of every rank's batches.
        kind: How they are loaded: ``"map"``, ``"stream"`` or ``"resumable"``.
        momentum: Of SGD.
        tokens: Whether it logs a number of tokens, instead of samples: 3 for each sample of rank 1, otherwise 1.
    """

    def __init__(self, batches: Sequence[int], kind: str = "map", momentum: float = 0.0, tokens: bool = False) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.batches, self.kind, self.momentum, self.tokens = tuple(batches), kind, momentum, tokens
        self.report: Any = {"seen": [], "validated": [], "idle": [], "x": []}

    def on_train_epoch_start(self) -> None:
        self.report["seen"].append([])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not self.report["seen"]:  # after a resume
            self.report["seen"].append([])
        self.report["seen"][-1] += batch.tolist()
        if self.tokens:
            self.log("tokens", len(batch) * (3.0 if self.global_rank == 1 else 1.0))
        loss = 0.5 * (self.x - batch).square().mean()
        self.log("mean_sample", batch.mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        assert outputs["loss"] >= 0
        assert len(batch)
        self.report["idle"].append(self.trainer.strategy.is_idle)
        self.report["x"].append(self.x.item())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.report["validated"].append((self.trainer.global_step, self.x.item()))
        self.log("x", self.x.detach(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=self.momentum)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10**6), "interval": "step"}]

    def train_dataloader(self) -> Any:
        numbers = numbers_of(self.global_rank, self.batches[self.global_rank])
        if self.kind == "resumable":
            return Resumable(numbers.split(BATCH))
        if self.kind == "combined":
            return CombinedLoader(DataLoader(numbers, batch_size=BATCH), "min_size")
        return DataLoader(Stream(numbers) if self.kind == "stream" else numbers, batch_size=BATCH)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.zeros(1))


class Node:
    """One node in the calculation."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.x, self.batches, self.samples, self.steps = 0.0, batches, 0, 0


def calculated(
    scheme: Any, batches: Sequence[int], epochs: int = 1, accumulate: int = 1, mean: str = "weighted"
) -> float:
    """Return the parameter at the end of a run of nodes of one rank, step by step in plain Python."""
    nodes = [Node(numbers_of(rank, own).split(BATCH)) for rank, own in enumerate(batches)]
    period = getattr(scheme, "sync_every", None)
    reference, velocity, steps = 0.0, 0.0, 0

    def synchronize() -> None:
        nonlocal reference, velocity
        total = sum(node.samples for node in nodes)
        if total:
            shares = [node.samples / total for node in nodes]
            change = sum(share * (node.x - reference) for share, node in zip(shares, nodes, strict=True))
            if mean == "normalized":
                tau = sum(share * node.steps for share, node in zip(shares, nodes, strict=True))
                change = tau * sum(
                    share * (node.x - reference) / node.steps
                    for share, node in zip(shares, nodes, strict=True)
                    if node.steps
                )
        else:
            change = 0.0
        if isinstance(scheme, DiLoCo):  # SGD with learning rate 0.7 and Nesterov momentum 0.9
            velocity = 0.9 * velocity - change
            reference -= 0.7 * (-change + 0.9 * velocity)
        else:
            reference += change
        for node in nodes:
            node.x, node.samples, node.steps = reference, 0, 0

    for _ in range(epochs):
        for first in range(0, max(batches), accumulate):
            gradients = []
            for node in nodes:
                window = node.batches[first : first + accumulate]
                gradients.append(sum((node.x - batch.mean().item()) / accumulate for batch in window))
                node.samples += sum(map(len, window))
            windows = [len(node.batches[first : first + accumulate]) for node in nodes]
            if isinstance(scheme, AllReduce):
                # Lightning divides by the number of batches, also where the loader ends before
                total, most = sum(windows), max(windows)
                gradient = sum(g * most for g in gradients) / total
                for node in nodes:
                    node.x -= LR * gradient
                continue
            for node, gradient, own in zip(nodes, gradients, windows, strict=True):
                node.x -= LR * gradient
                node.steps += bool(own)
            steps += 1
            in_epoch = first // accumulate + 1
            if period and (in_epoch if isinstance(scheme, PeriodicAveraging) else steps) % period == 0:
                synchronize()
        if isinstance(scheme, PeriodicAveraging):
            synchronize()
    if isinstance(scheme, DiLoCo):  # the run ends with the mean by samples
        total = sum(node.samples for node in nodes)
        return sum(node.x * node.samples for node in nodes) / total if total else nodes[0].x
    return nodes[0].x


def strategy(scheme: Any, ranks_per_node: Any = 1, unequal_data: Any = True, **chosen: Any) -> dict[str, Any]:
    health = Health(hang_timeout=10.0)
    return {
        "scheme": scheme,
        "ranks_per_node": ranks_per_node,
        "unequal_data": unequal_data,
        "health": health,
        **chosen,
    }


def fit_uneven(fit: Any, module: pl.LightningModule, scheme: Any, **chosen: Any) -> Any:
    own = {
        name: chosen.pop(name) for name in ("ranks_per_node", "unequal_data", "health", "wire_dtype") if name in chosen
    }
    return fit(
        module,
        strategy(scheme, **own),
        **{"devices": len(module.batches), "use_distributed_sampler": False, "num_sanity_val_steps": 0, **chosen},
    )


def each_sample_once(reports: Sequence[Any], batches: Sequence[int], epochs: int = 1) -> None:
    for rank, report in enumerate(reports):
        expected = numbers_of(rank, batches[rank]).tolist()
        assert [sorted(seen) for seen in report["report"]["seen"]] == [sorted(expected)] * epochs


def ends_of(reports: Sequence[Any]) -> float:
    """Return the parameter, which is equal to the bit on all ranks."""
    (x,) = {report["state_dict"]["x"].item() for report in reports}
    return float(x)


SCHEMES = [AllReduce(), PeriodicAveraging(10), PeriodicAveraging(None), DiLoCo(10)]


@pytest.mark.pairwise
@pytest.mark.pooled
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


@pytest.mark.pooled
@pytest.mark.parametrize(
    "scheme", on_push([PeriodicAveraging(10), PeriodicAveraging(None), DiLoCo(10)], PeriodicAveraging(10)), ids=repr
)
def test_nodes_average_by_fednova(fit, scheme):
    reports = fit_uneven(fit, Uneven(ISSUE), scheme, unequal_data=UnequalData(mean="normalized"))
    assert ends_of(reports) == pytest.approx(calculated(scheme, ISSUE, mean="normalized"), rel=1e-12)


@pytest.mark.pairwise
@pytest.mark.pooled
@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(3), DiLoCo(3)], ids=repr)
def test_accumulated_gradients_of_a_node_that_ends_are_used(fit, scheme, kind):
    batches = (22, 13, 7)  # the last windows of 4 batches have 2, 1 and 3
    reports = fit_uneven(fit, Uneven(batches, kind), scheme, accumulate_grad_batches=4)
    each_sample_once(reports, batches)
    assert ends_of(reports) == pytest.approx(calculated(scheme, batches, accumulate=4), rel=1e-12)


@pytest.mark.nightly
@pytest.mark.pooled
@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(2), DiLoCo(2)], ids=repr)
def test_accumulation_on_nodes_of_two_ranks(fit, scheme, kind):
    batches = (10, 10, 5, 5)
    reports = fit_uneven(fit, Uneven(batches, kind), scheme, ranks_per_node=2, accumulate_grad_batches=3)
    each_sample_once(reports, batches)

    class Pairs(Uneven):  # a rank with the batches of both
        def train_dataloader(self) -> Any:
            both = [numbers_of(2 * self.global_rank + local, self.batches[self.global_rank]) for local in (0, 1)]
            joined = [torch.cat(pair) for pair in zip(*(each.split(BATCH) for each in both), strict=True)]
            return DataLoader(joined, batch_size=None)

    alone = fit_uneven(fit, Pairs((10, 5)), scheme, accumulate_grad_batches=3, forked=True)
    assert ends_of(reports) == pytest.approx(ends_of(alone), rel=1e-12)


@pytest.mark.pooled
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_ranks_of_a_node_take_the_steps_of_its_shortest_loader(fit, kind):
    reports = fit_uneven(fit, Uneven((9, 7, 4, 5), kind), PeriodicAveraging(3), ranks_per_node=2)
    assert [len(report["report"]["seen"][0]) for report in reports] == [14, 14, 8, 8]
    ends_of(reports)


@pytest.mark.pooled
@pytest.mark.parametrize("scheme", on_push(SCHEMES, AllReduce(), PeriodicAveraging(10)), ids=repr)
def test_equal_loaders_keep_all_bits(fit, scheme):
    ends = [
        ends_of(fit_uneven(fit, Uneven((12, 12, 12), momentum=0.9), scheme, unequal_data=unequal, max_epochs=2))
        for unequal in (False, True)
    ]
    assert ends[0] == ends[1]


class KeepsGradients(Uneven):
    """Sets gradients to zero, which an optimizer with momentum would use."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.pooled
def test_idle_node_keeps_momentum_and_parameters(fit):
    first, last = fit_uneven(fit, KeepsGradients((12, 3), momentum=0.9), PeriodicAveraging(6))
    assert last["report"]["idle"] == [False] * 3 + [True] * 9
    assert not any(first["report"]["idle"])
    assert len({*last["report"]["x"][2:5]}) == 1
    assert len({*last["report"]["x"][5:11]}) == 1


@pytest.mark.pairwise
@pytest.mark.pooled
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


class Worsening(EarlyStopping):
    """Stops at the second validation."""

    def __init__(self) -> None:
        super().__init__("x", patience=1, mode="max", min_delta=1e9)


@pytest.mark.pooled
def test_run_stops_early_on_all_nodes(fit):
    reports = fit_uneven(
        fit, Uneven((11, 5)), PeriodicAveraging(4), max_epochs=9, val_check_interval=4, callbacks=[Worsening()]
    )
    assert len({len(report["report"]["x"]) for report in reports}) == 1
    assert len(reports[0]["report"]["x"]) < 99
    ends_of(reports)


@pytest.mark.pooled
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
@pytest.mark.pooled
@pytest.mark.parametrize("step", [5, 14, 33])  # within a period; where one node idles; in the second epoch
@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(4), DiLoCo(4)], ids=repr)
def test_resume_within_an_epoch_is_exact(fit, tmp_path, scheme, step):
    path, batches = tmp_path / "saved.ckpt", (20, 12, 7)

    def run(**chosen: Any) -> Any:
        module = Uneven(batches, "resumable", momentum=0.9)
        options = strategy(scheme, checkpoint_replicas=True)
        return fit(module, options, devices=3, max_epochs=2, num_sanity_val_steps=0, **chosen)

    whole = run(callbacks=[SaveAfter(step, path)])
    resumed = run(fit_arguments={"ckpt_path": path})
    assert ends_of(resumed) == ends_of(whole)
    for before, after in zip(whole, resumed, strict=True):
        assert before["report"]["x"][step:] == after["report"]["x"]


@pytest.mark.pooled
def test_resume_without_replicas_begins_with_the_averaged_model(fit, tmp_path):
    path, batches = tmp_path / "saved.ckpt", (20, 12, 7)
    whole = fit_uneven(
        fit, Uneven(batches, "resumable"), PeriodicAveraging(4), callbacks=[SaveAfter(12, path)], max_epochs=2
    )
    resumed = fit_uneven(
        fit, Uneven(batches, "resumable"), PeriodicAveraging(4), fit_arguments={"ckpt_path": path}, max_epochs=2
    )
    assert ends_of(resumed) == ends_of(whole)  # the checkpoint was saved at a synchronization


@pytest.mark.pooled
def test_logged_tokens_weigh_nodes(fit):
    reports = fit_uneven(fit, Uneven((4, 4), tokens=True), PeriodicAveraging(None), unequal_data=UnequalData("tokens"))
    ends = []
    for rank in (0, 1):
        x = 0.0
        for batch in numbers_of(rank, 4).split(BATCH):
            x -= LR * (x - batch.mean().item())
        ends.append(x)
    assert ends_of(reports) == pytest.approx((ends[0] + 3 * ends[1]) / 4, rel=1e-12)


@pytest.mark.pooled
def test_logged_tokens_weigh_gradients(fit):
    reports = fit_uneven(fit, Uneven((4, 2), tokens=True), AllReduce(), unequal_data=UnequalData("tokens"))
    x = 0.0
    mine, others = (numbers_of(rank, 4 - 2 * rank).split(BATCH) for rank in (0, 1))
    for step, batch in enumerate(mine):
        gradient = x - batch.mean().item()
        if step < 2:
            gradient = (gradient + 3 * (x - others[step].mean().item())) / 4
        x -= LR * gradient
    assert ends_of(reports) == pytest.approx(x, rel=1e-12)


@pytest.mark.nightly
@pytest.mark.pooled
@pytest.mark.parametrize("kind", ["combined", "stream"])
@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(2)], ids=repr)
def test_combined_loaders_and_limited_batches(fit, scheme, kind):
    reports = fit_uneven(fit, Uneven((12, 6, 3), kind), scheme, limit_train_batches=5)
    assert [len(report["report"]["seen"][0]) for report in reports] == [10, 10, 6]
    assert ends_of(reports) == pytest.approx(calculated(scheme, (5, 5, 3)), rel=1e-12)


@pytest.mark.nightly
@pytest.mark.pooled
@pytest.mark.parametrize("wire_dtype", ["bfloat16", "int4"])
@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(5)], ids=repr)
def test_encoded_exchanges_end_near_the_unencoded_ones(fit, scheme, wire_dtype):
    batches = (30, 20, 9)
    reports = fit_uneven(fit, Uneven(batches), scheme, accumulate_grad_batches=2, wire_dtype=wire_dtype)
    assert ends_of(reports) == pytest.approx(calculated(scheme, batches, accumulate=2), rel=0.05)


class Normalized(Uneven):
    """Has a BatchNorm layer, whose buffers DDP broadcasts before forward passes."""

    def __init__(self, batches: Sequence[int]) -> None:
        super().__init__(batches)
        self.norm = torch.nn.BatchNorm1d(1, affine=False).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.norm(batch[:, None])
        return super().training_step(batch, batch_idx)


@pytest.mark.pairwise
@pytest.mark.pooled
@pytest.mark.parametrize("batches", [(9, 4), (4, 9)])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("scheme", [AllReduce(), PeriodicAveraging(3)], ids=repr)
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


@pytest.mark.pooled
def test_checkpoints_of_a_callback_are_written_on_all_nodes(fit, tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    fit_uneven(fit, Uneven((11, 5)), PeriodicAveraging(3), callbacks=[saving], enable_checkpointing=True)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=4.ckpt", "step=8.ckpt"]


@pytest.mark.pooled
def test_accumulation_may_change_between_epochs(fit):
    changes = GradientAccumulationScheduler({0: 1, 1: 3})
    reports = fit_uneven(fit, Uneven((10, 5)), AllReduce(), max_epochs=2, callbacks=[changes])
    each_sample_once(reports, (10, 5), epochs=2)
    ends_of(reports)


# ---- the loader alone -----------------------------------------------------------------------------------------------


class NoLength:
    """Yields numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def loaded(loader: Any, check_every: int = 2) -> Any:
    """Return a function of a rank's topology: what it loads in two epochs, negative where it idles."""

    def work(topology: Any) -> list[list[int]]:
        begun = 0
        own = loader(topology.rank)
        idling = IdlingLoader(own, "max_size_cycle", topology, torch.device("cpu"), lambda: begun, lambda: check_every)
        epochs = []
        for _ in range(2):
            begun, yielded = 0, []
            for batch, *_ in iter(idling):
                yielded.append(~batch if idling.is_idle(begun) else batch)
                begun += 1  # noqa: SIM113  # the loader reads it
            epochs.append(yielded)
        assert epochs[0] == epochs[1]
        return epochs[0]

    return work


@pytest.mark.filterwarnings("ignore:ranks of a node")
def test_loader_with_length_ends_with_the_longest_node():
    lengths = (5, 4, 3, 2)
    result = on_ranks(loaded(lambda rank: list(range(lengths[rank]))), ((0, 1), (2, 3)))
    assert result == [[0, 1, 2, 3]] * 2 + [[0, 1, ~1, ~1]] * 2


def test_loader_without_length_ends_at_a_check(caplog):
    lengths = (5, 6, 3, 3)
    result = on_ranks(loaded(lambda rank: NoLength(lengths[rank])), ((0, 1), (2, 3)))
    assert result == [[0, 1, 2, 3, 4, ~4], [0, 1, 2, 3, 4, ~5], *[[0, 1, 2, ~2, ~2, ~2]] * 2]
    (message,) = caplog.messages
    assert message.startswith("rank 1 (node 0) has more batches than another rank of its node")


def test_unused_batches_are_named_once():
    with pytest.warns(UserWarning, match=r"node 0 has \[5, 4\] batches on its ranks and uses 4 of each") as warned:
        on_ranks(loaded(lambda rank: list(range(5 - rank))), ((0, 1),))
    assert sum("stay unused" in str(each.message) for each in warned) == 2  # threads are all rank 0 to Lightning


# ---- refused -------------------------------------------------------------------------------------------------------


class LogsAtSteps(Uneven):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("now", batch.mean(), on_step=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


class OfStrings(Uneven):
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
        (OfStrings((4, 2)), {}, r"number of samples of a batch \(object\) is unknown"),
        (Uneven((4, 2)), {"unequal_data": UnequalData("tokens")}, r"needs self.log\('tokens', ...\)"),
        (WithLBFGS((4, 2)), {}, "LBFGS evaluates the loss several times"),
        (ManualUneven(), {}, "manual optimization"),
        (Unsized((4, 2)), {}, r"dataloaders of ranks \[1\] have no length"),
        (Uneven((4, 2)), {"use_distributed_sampler": True}, r"these have \[8, 4\] samples"),
    ],
)
def test_programs_that_would_hang_are_refused(fit, module, chosen, message):
    with pytest.raises(Exception, match=f"unequal_data: .*{message}"):
        fit_uneven(fit, module, PeriodicAveraging(2), **chosen)


def test_find_unused_parameters_is_refused_with_all_reduce(fit):
    with pytest.raises(Exception, match="find_unused_parameters=True needs a backward pass on every rank"):
        fit(
            Uneven((4, 2)),
            strategy(AllReduce(), find_unused_parameters=True, start_method="fork"),
            devices=2,
            use_distributed_sampler=False,
        )


def test_error_of_unequal_loaders_names_the_remedy(fit):
    with pytest.raises(Exception, match=r"HierarchicalStrategy\(unequal_data=True\)"):
        fit_uneven(fit, Uneven((4, 2)), PeriodicAveraging(2), unequal_data=False)


def test_one_process_trains_alone(tmp_path):
    module = Uneven((5,))
    trainer = one_trainer(tmp_path, strategy=HierarchicalStrategy(unequal_data=True), use_distributed_sampler=False)
    trainer.fit(module)
    again = pickle.loads(pickle.dumps(trainer))
    assert type(again.fit_loop._combined_loader) is CombinedLoader  # noqa: SLF001
    assert module.x.item() == pytest.approx(calculated(AllReduce(), (5,), epochs=2), rel=1e-12)
