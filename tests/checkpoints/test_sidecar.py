"""A resume from a checkpoint with replicas is bit-identical with the run that was never interrupted."""

from __future__ import annotations

import math
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from problems import SaveAfter, one_trainer, same_bits
from sidecar_cases import STEPS, TWO_NODES, AdamW, Net, schemes
from torch.utils.data import DataLoader

from lightning_hiercomm import (
    AllReduce,
    DiLoCo,
    HierarchicalStrategy,
    PeriodicAveraging,
    Transport,
)

pytestmark = pytest.mark.pooled


class Thawing(Net):
    """The first layer is frozen for three steps, by the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self.layers[0].requires_grad_(self.global_step >= 3)


# by night what the same scheme shows by day with another wire, or with more in flight
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name in ("all_reduce", "gossip", "diloco_int4", "periodic")))
        for name in schemes()
    ],
)
def test_a_resume_at_the_end_of_an_epoch_is_bit_identical(fit, tmp_path, name):
    """With a narrow wire, whose last averaged values and what it keeps back are state, too.

    Without one, see compatibility/test_checkpoints.
    """
    path, wire = tmp_path / "saved.ckpt", name.rpartition("_")[2]

    def strategy():
        wire_dtype = wire if wire.startswith("int") else "bfloat16"
        return {"scheme": schemes()[name], "wire_dtype": wire_dtype, "checkpoint_replicas": True}

    whole = fit(Net(), strategy(), max_epochs=2, callbacks=[SaveAfter(STEPS, path)])
    resumed = fit(Net(), strategy(), max_epochs=2, fit_arguments={"ckpt_path": path})
    for one, other in zip(whole, resumed, strict=True):
        assert other["report"] == one["report"][STEPS:]
        for key, value in one["state_dict"].items():
            assert torch.equal(value, other["state_dict"][key]), key


class Logs(Net):
    """Logs its loss, which is another one on each rank."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def _saved_by_names_of_their_own(folder):
    saves = ModelCheckpoint(folder, "{step}-{loss:.6f}", every_n_train_steps=STEPS, save_top_k=-1)

    def run(resume=None, **arguments):
        strategy = HierarchicalStrategy(PeriodicAveraging(3), ranks_per_node=1, checkpoint_replicas=True)
        trainer = one_trainer(folder, devices=2, strategy=strategy, limit_train_batches=STEPS, **arguments)
        trainer.fit(module := Logs(), ckpt_path=resume)
        return module.report, trainer

    whole, trainer = run(callbacks=[saves], enable_checkpointing=True)
    resumed, _ = run(next(folder.glob(f"step={STEPS}-*.ckpt")))
    last, name = f"step={2 * STEPS}-*.ckpt*", saves.best_model_path
    trainer.strategy.remove_checkpoint(name)
    deadline = time.monotonic() + 20
    while any(folder.glob(last)) and time.monotonic() < deadline:  # rank 0 deletes them
        time.sleep(0.01)
    return whole[STEPS:], resumed, Path(name).name, [*folder.glob(last)]


def test_a_file_name_with_a_rank_dependent_metric_is_the_same_on_all_ranks(borrow):
    ranks = borrow(_saved_by_names_of_their_own, ranks=2)
    for whole, resumed, *_ in ranks:
        assert resumed == whole
    (*_, name, _), (*_, other_name, left) = ranks
    assert name != other_name
    assert left == []


class Wide(Net):
    """So many elements that three nodes add them up in a ring, whose order depends on where an element is."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (torch.nn.Linear(2000, 5), torch.nn.Linear(5, 2000), torch.nn.Linear(5, 5)):
            self.layers.insert(0, layer)

    def on_after_backward(self) -> None:
        self.report.append([parameter.grad.flatten().tolist() for parameter in self.parameters()])

    def on_train_batch_end(self, *_: object) -> None:
        """Says nothing more."""


def _resumed_on_three_nodes(folder):
    reports = {}
    for wire in (None, "int8"):
        path = folder / f"{wire}.ckpt"
        whole, resumed = Wide(), Wide()
        steps = 3
        for module in (whole, resumed):
            strategy = HierarchicalStrategy(AllReduce(), ranks_per_node=1, wire_dtype=wire, checkpoint_replicas=True)
            callbacks = [SaveAfter(steps, path)] if module is whole else []
            length = {"limit_train_batches": steps}
            trainer = one_trainer(folder, devices=3, strategy=strategy, callbacks=callbacks, **length)
            trainer.fit(module, ckpt_path=None if module is whole else path)
        reports[wire] = whole.report[steps:], resumed.report
    return reports


def test_a_resume_sums_over_three_nodes_in_the_order_of_the_run_before(borrow):
    """DDP by itself cuts its buckets after the first step of a process, so its first step has another order."""
    for reports in borrow(_resumed_on_three_nodes, ranks=3):
        for wire, (whole, resumed) in reports.items():
            assert resumed == whole, wire


def _unfrozen_and_resumed(folder):
    reports = {}
    for name in ("periodic", "diloco", "steps_delay", "gossip"):
        scheme = schemes()[name] if name != "diloco" else DiLoCo(4, AdamW)
        path = folder / f"{name}.ckpt"
        for run in ("whole", "resumed", "resumed without replicas"):
            arguments = {"ranks_per_node": 1, "checkpoint_replicas": run != "resumed without replicas"}
            callbacks = [SaveAfter(STEPS, path)] if run == "whole" else []
            strategy, length = HierarchicalStrategy(scheme, **arguments), {"limit_train_batches": STEPS}
            trainer = one_trainer(folder, devices=2, strategy=strategy, callbacks=callbacks, **length)
            trainer.fit(module := Thawing(), ckpt_path=None if run == "whole" else path)
            reports[name, run] = module.report, trainer.global_step
    return reports


def test_a_resume_after_parameters_were_unfrozen_is_bit_identical(borrow):
    for reports in borrow(_unfrozen_and_resumed, ranks=2):
        for (name, run), (report, steps) in reports.items():
            assert steps == 2 * STEPS
            if run == "resumed":
                assert report == reports[name, "whole"][0][STEPS:], name


class Best(Net):
    """Keeps its best loss, which begins at infinity and so has no mean in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("best", torch.tensor(math.inf))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx) + self.global_rank
        self.best.copy_(torch.minimum(self.best, loss.detach()))
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        self.report.append(self.best.item())


def _resumed_with_best(folder):
    reports = []
    for number, wire in enumerate((None, "int8")):
        path = folder / f"{number}.ckpt"
        whole, resumed = Best(), Best()
        for module in (whole, resumed):
            arguments = {"ranks_per_node": 1, "wire_dtype": wire, "checkpoint_replicas": True}
            strategy = HierarchicalStrategy(PeriodicAveraging(2), **arguments)
            arguments = {"callbacks": [SaveAfter(STEPS, path)] * (module is whole), "limit_train_batches": STEPS}
            trainer = one_trainer(folder, devices=2, strategy=strategy, **arguments)
            trainer.fit(module, ckpt_path=None if module is whole else path)
        reports.append((whole.report[STEPS:], resumed.report))
    return reports


def test_a_buffer_without_mean_has_none_after_a_resume(borrow):
    for reports in borrow(_resumed_with_best, ranks=2):
        for whole, resumed in reports:
            assert resumed == whole


class Shares(Net):
    """Reports the running mean that ranks of a node share, and validates.

    Attributes:
        automatic_optimization: If not, it steps its optimizer itself.
    """

    def __init__(self, automatic_optimization: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic_optimization

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        self.report.append(self.layers[1].running_mean.tolist())

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.layers(batch[0])

    def val_dataloader(self) -> DataLoader:
        data = self.train_dataloader().dataset
        return DataLoader(data, generator=torch.Generator())  # or it takes a number from dropout's


def _validated_and_resumed(folder):
    path = folder / "saved.ckpt"
    reports = {}
    steps = 4  # per epoch
    for kind in ("averaged", "replica", "manual"):
        for run, validations in {"plain": 0, "whole": 2, "resumed": 2}.items():
            if (kind, run) == ("replica", "plain"):  # no run validates this one
                reports[kind, run] = reports["averaged", run]
                continue
            evaluate = "replica" if kind == "replica" else "averaged"
            arguments = {"ranks_per_node": 2, "evaluate": evaluate, "checkpoint_replicas": True}
            strategy = HierarchicalStrategy(PeriodicAveraging(3, at_epoch_end=False), **arguments)
            callbacks = [SaveAfter(steps, path)] if run == "whole" else []
            arguments = {
                "limit_train_batches": steps,
                "limit_val_batches": validations,
                "val_check_interval": steps // 2,
            }
            trainer = one_trainer(folder, devices=4, strategy=strategy, callbacks=callbacks, **arguments)
            module = Shares(automatic_optimization=kind != "manual")
            trainer.fit(module, ckpt_path=path if run == "resumed" else None)
            reports[kind, run] = module.report
    return reports, steps


@pytest.mark.long("eight runs on four ranks")
def test_buffers_shared_in_a_node_are_unchanged_by_validation(borrow):
    """DDP shares them before a forward pass, except the first after a validation.

    And Lightning's manual optimization lets it do so before the first one of a process only.
    """
    for reports, steps in borrow(_validated_and_resumed, ranks=4):
        for kind in ("averaged", "replica", "manual"):
            plain, whole, resumed = (reports[kind, run] for run in ("plain", "whole", "resumed"))
            assert whole == plain, kind
            assert resumed == whole[steps:], kind


@pytest.mark.parametrize("name", ["periodic", "gossip_overlap", "steps_delay"])
def test_resuming_a_finished_run_ends_on_the_averaged_model(fit, tmp_path, name):
    strategy = {"scheme": schemes()[name], "checkpoint_replicas": True, "ranks_per_node": 1}
    saves = {"callbacks": [ModelCheckpoint(tmp_path, "over")], "enable_checkpointing": True}
    whole = fit(Net(), strategy, **saves, **TWO_NODES)
    again = fit(Net(), strategy, fit_arguments={"ckpt_path": tmp_path / "over.ckpt"}, **TWO_NODES)
    same_bits([*whole, *again])


@pytest.mark.parametrize("max_epochs", [0, 1])
def test_a_run_in_which_nothing_is_left_to_train_can_be_saved_afterwards(borrow, tmp_path, max_epochs):
    def main(folder):
        def trainer(**arguments):
            strategy = HierarchicalStrategy(DiLoCo(6, AdamW, fragments=2, staleness=2), ranks_per_node=1)
            return one_trainer(folder, devices=2, strategy=strategy, **arguments)

        first = trainer(max_epochs=max_epochs, callbacks=[ModelCheckpoint(folder, "over")], enable_checkpointing=True)
        first.fit(Net())
        again = trainer(max_epochs=max_epochs)
        again.fit(Net(), ckpt_path=folder / "over.ckpt" if max_epochs else None)
        again.save_checkpoint(folder / "again.ckpt")
        first.save_checkpoint(folder / "first.ckpt")
        schedules = [
            torch.load(folder / f"{which}.ckpt", weights_only=True)["hiercomm"] for which in ("first", "again")
        ]
        return [schedule["schemes"][0]["steps"] for schedule in schedules]

    assert borrow(main, 2) == [[2 * STEPS * max_epochs] * 2] * 2


@pytest.fixture(scope="module")
def saved_after_a_synchronization(borrow, tmp_path_factory):
    path = tmp_path_factory.mktemp("outer") / "saved.ckpt"

    def main(folder):
        strategy = HierarchicalStrategy(DiLoCo(6, AdamW), ranks_per_node=2)
        one_trainer(folder, devices=4, strategy=strategy, callbacks=[SaveAfter(11, path)], max_steps=11).fit(Net())

    borrow(main)
    return path


@pytest.mark.parametrize("nodes", [2, 1, [3, 1]], ids=str)
def test_other_nodes_go_on_with_the_outer_optimizer_of_a_plain_checkpoint(fit, saved_after_a_synchronization, nodes):
    path = saved_after_a_synchronization
    saved = torch.load(path, weights_only=True)
    (scheme,) = saved["hiercomm"]["schemes"]
    outer = scheme["outer"]["state"]
    assert [state["step"].item() for state in outer] == [1.0] * 6  # one synchronization before
    assert [state["exp_avg"].shape for state in outer] == [p.shape for p in Net().parameters()]
    seen = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if not seen:
                seen.append(trainer.strategy.schemes[0].state_dict(shared=True)["outer"]["state"])
                pl_module.report.append(seen[0])

    resumed = fit(
        Net(),
        {
            "scheme": DiLoCo(6, AdamW, fragments=2, staleness=1),
            "ranks_per_node": nodes,
            "transport": Transport(bucket_mb=1e-4),
        },
        callbacks=[Look()],
        max_epochs=2,
        fit_arguments={"ckpt_path": path},
    )
    for report in resumed:
        for restored, before in zip(report["report"][0], outer, strict=True):
            assert restored.keys() == before.keys()
            assert all(torch.equal(restored[name], before[name]) for name in before)
