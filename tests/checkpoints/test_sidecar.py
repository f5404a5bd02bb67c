"""A resume from a checkpoint with replicas is bit-identical with the run that was never interrupted."""

from __future__ import annotations

import functools
import math
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import fsspec
import lightning.pytorch as pl
import numpy
import pytest
import torch
from harness import on_ranks
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from problems import SaveAfter, one_trainer, report_of, same_bits
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Gossip,
    HierarchicalStrategy,
    PeriodicAveraging,
    Plateau,
    StepsDelay,
    Transport,
)
from lightning_hiercomm.checkpoints.durable import DurableCheckpointIO
from lightning_hiercomm.checkpoints.plain import remove_replaced
from lightning_hiercomm.checkpoints.sidecar import (
    check_sidecar,
    checksum,
    load_sidecar,
    random_state,
    set_random_state,
    sidecar_path,
    sidecar_state,
)
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas
from lightning_hiercomm.run.training_run import TrainingRun

pytestmark = pytest.mark.pooled
STEPS = 6  # per epoch
TWO_NODES: dict = {"devices": 2, "limit_train_batches": STEPS}  # of one rank, for what four ranks show no better


class Net(pl.LightningModule):
    """Random numbers (dropout), BatchNorm, momentum, and a schedule; ``report`` is a weight after each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 2)
        )
        self.report: list[list[float]] = []

    def on_fit_start(self) -> None:
        torch.manual_seed(self.global_rank)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def on_train_batch_end(self, *_: object) -> None:
        self.report.append(self.layers[0].weight[0].tolist())

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(STEPS * 4 * 2, 5, generator=generator)
        y = torch.randint(2, (len(x),), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=2)


def schemes():
    return {
        "all_reduce": AllReduce(),
        "periodic": PeriodicAveraging(4, at_epoch_end=False),
        "daso": DASO(sync_every=4, staleness=2, warmup=0, cooldown=0),
        "gossip": Gossip(fragments=2),
        "gossip_overlap": Gossip(fragments=2, overlap=True),
        "steps_delay": StepsDelay(delay=3, warmup_steps=3),
        "all_reduce_int8": AllReduce(),
        "diloco_int4": DiLoCo(4, staleness=3),  # in flight after 6 steps
        "streaming_int8": DiLoCo(6, AdamW, fragments=2, staleness=2, outer_scheduler=Halved),
    }


AdamW = partial(torch.optim.AdamW, lr=0.02)
Halved = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)


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
    last, name = f"step={2 * STEPS}-*.ckpt", saves.best_model_path
    if trainer.global_rank == 0:  # as if each rank had a disk of its own
        Path(name).unlink()
    deadline = time.monotonic() + 20
    while any(folder.glob(last)) and time.monotonic() < deadline:
        time.sleep(0.01)
    if trainer.global_rank == 1:
        trainer.strategy.remove_checkpoint(name)
    return whole[STEPS:], resumed, Path(name).name, [*folder.glob(f"{last}.replicas")]


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
        self.report.append([checksum([parameter.grad]) for parameter in self.parameters()])

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


class KeepsAverage(pl.Callback):
    """An average of the weights that its author saves: in the callback's state, and in an entry of its own."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.squares = torch.zeros(())

    def on_train_batch_end(self, trainer, pl_module, *_):
        for name, value in pl_module.named_parameters():
            self.average[name] = self.average.get(name, value.detach()).lerp(value.detach(), 0.1)
        self.squares = self.squares * 0.5 + pl_module.layers[0].weight.detach().square().sum()

    def state_dict(self):
        return {"average": {name: value.clone() for name, value in self.average.items()}}

    def load_state_dict(self, state):
        self.average = state["average"]

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["squares of the author's"] = self.squares

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.squares = checkpoint["squares of the author's"]


class Tells(pl.Callback):
    """Reports what callbacks hold after every batch; each rank its own."""

    def __init__(self, ema: EMAWeightAveraging, own: KeepsAverage) -> None:
        self.of = ema, own

    def on_train_batch_end(self, trainer, pl_module, *_):
        ema, own = self.of
        averages = [*ema._average_model.module.parameters(), *ema._average_model.module.buffers()]
        state = torch.cat([value.flatten().double() for value in (*averages, *own.average.values(), own.squares)])
        pl_module.report.append(state.tolist())


def _resumed_with_averages(folder):
    reports = {}
    for name in ("periodic", "diloco_int4", "gossip_overlap"):
        path = folder / f"{name}.ckpt"
        scheme = schemes()[name] if name != "periodic" else PeriodicAveraging(5, at_epoch_end=False)
        whole, resumed = Net(), Net()
        for module in (whole, resumed):
            strategy = HierarchicalStrategy(scheme, ranks_per_node=1, checkpoint_replicas=True)
            averages = EMAWeightAveraging(decay=0.7), KeepsAverage()
            callbacks = [*averages, Tells(*averages), *([SaveAfter(STEPS, path)] if module is whole else [])]
            arguments = {"callbacks": callbacks, "limit_train_batches": STEPS}
            trainer = one_trainer(folder, devices=2, strategy=strategy, **arguments)
            trainer.fit(module, ckpt_path=None if module is whole else path)
        ends = [[value.tolist() for value in module.state_dict().values()] for module in (whole, resumed)]
        reports[name] = whole.report, resumed.report, ends
    return reports


def test_averages_that_callbacks_keep_go_on_as_each_ranks_own(borrow):
    one, other = borrow(_resumed_with_averages, ranks=2)
    for name in one:
        assert one[name][0][: 2 * STEPS] != other[name][0][: 2 * STEPS], "nodes differ"
        for whole, resumed, ends in (one[name], other[name]):
            assert len(resumed) == STEPS * 2  # after every batch the module reports, and a callback
            assert resumed == whole[-len(resumed) :], name
            assert ends[0] == ends[1], name


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


def sidecars_of(path: Path) -> list[str]:
    """Return the paths in the folder of a checkpoint, which exists and has nothing else next to it."""
    assert path.exists()
    folder = path.with_name(f"{path.name}.replicas")
    assert {*path.parent.glob(f"{path.name}*")} == {path, folder}
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


def identity_of(path: Path) -> str:
    return torch.load(path, weights_only=True)["hiercomm"]["identity"]


def test_sidecars_follow_the_deletion_of_their_checkpoint(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, filename="{epoch}", monitor=None, every_n_epochs=1, save_top_k=1)
    strategy = {"checkpoint_replicas": True, "ranks_per_node": 1}
    fit(Net(), strategy, max_epochs=2, callbacks=[callback], enable_checkpointing=True, **TWO_NODES)
    path = tmp_path / "epoch=1.ckpt"
    assert sidecars_of(path) == [f"{identity_of(path)}/rank-{rank:04d}" for rank in range(2)]
    assert len([*tmp_path.glob("epoch*")]) == 2


class Disk(pl.Callback):
    """Reports what lies in this process's memory, which plays the disk of a node of one rank: no other one sees it."""

    def on_fit_end(self, trainer, pl_module):
        pl_module.report = sorted(path.removeprefix("/saves/") for path in fsspec.filesystem("memory").find("/saves"))


@pytest.mark.parametrize("io", [None, AsyncCheckpointIO], ids=["now", "overlapped"])
def test_sidecars_of_deleted_checkpoints_are_removed_on_every_node(fit, io):
    def callbacks():
        best = {"monitor": "step", "mode": "max", "save_top_k": 1}
        yield ModelCheckpoint("memory://saves", "{step}", every_n_train_steps=2, **best)
        yield ModelCheckpoint("memory://saves", "newest", every_n_train_steps=2, enable_version_counter=False)
        yield Disk()

    strategy = {"ranks_per_node": 1, "checkpoint_replicas": True, "checkpoint_io": io and io()}
    forked = {"forked": True, "enable_checkpointing": True}  # with an empty memory
    fitted = fit(Net(), strategy, devices=2, max_epochs=1, callbacks=[*callbacks()], **forked)
    first, second = (report["report"] for report in fitted)
    assert [name.partition(".replicas")[0] for name in first] == ["newest.ckpt"] * 2 + ["step=12.ckpt"] * 2
    assert second == [name.replace("rank-0000", "rank-0001") for name in first if "rank-0000" in name]


class Links(ModelCheckpoint):
    CHECKPOINT_NAME_LAST = "last-{epoch}"


def test_a_run_resumes_from_a_remote_checkpoint(tmp_path):
    path = "memory://resumed/saved.ckpt"

    def fitted(**arguments):
        strategy = HierarchicalStrategy(PeriodicAveraging(4), checkpoint_replicas=True)
        saves = {"callbacks": [SaveAfter(STEPS, path)], "limit_train_batches": STEPS}
        trainer = one_trainer(tmp_path, strategy=strategy, **saves)
        trainer.fit(Net(), **arguments)
        return report_of(trainer)

    same_bits([fitted(), fitted(ckpt_path=path)])


def test_a_failed_save_gives_the_reason_and_leaves_no_sidecars(tmp_path):
    path, written = tmp_path / "saved.ckpt", []

    class Full(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, at, storage_options=None):
            if Path(at) == path:
                written.extend(tmp_path.iterdir())
                raise OSError("no room for it")
            super().save_checkpoint(checkpoint, at, storage_options)

    strategy = HierarchicalStrategy(PeriodicAveraging(4), checkpoint_replicas=True)
    trainer = one_trainer(tmp_path, strategy=strategy, plugins=[Full()], callbacks=[SaveAfter(2, path)])
    with pytest.raises(OSError, match="no room for it"):
        trainer.fit(Net())
    assert [each.name for each in written] == ["saved.ckpt.replicas"]  # the sidecar comes first
    assert [*tmp_path.iterdir()] == []


def test_an_interrupt_after_the_write_leaves_the_checkpoint_complete(tmp_path):
    path = tmp_path / "saved.ckpt"

    class Interrupted(DurableCheckpointIO):
        def save_checkpoint(self, checkpoint, at, storage_options=None):
            super().save_checkpoint(checkpoint, at, storage_options)
            if Path(at) == path:
                raise KeyboardInterrupt  # within the sync that makes the new name last

    strategy = HierarchicalStrategy(PeriodicAveraging(4), checkpoint_replicas=True)
    trainer = one_trainer(tmp_path, strategy=strategy, plugins=[Interrupted()], callbacks=[SaveAfter(2, path)])
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(Net())
    assert sidecars_of(path) == [f"{identity_of(path)}/rank-0000"]


def test_a_link_to_a_checkpoint_resumes_and_its_deletion_keeps_shards(fit, tmp_path):
    strategy = {"checkpoint_replicas": True, "ranks_per_node": 1}
    callback = Links(tmp_path, "{epoch}", save_top_k=-1, save_last="link")
    fit(Net(), strategy, max_epochs=2, callbacks=[callback], enable_checkpointing=True, **TWO_NODES)
    assert [path.name for path in tmp_path.glob("last*")] == ["last-epoch=1.ckpt"]
    assert len(sidecars_of(tmp_path / "epoch=0.ckpt")) == len(sidecars_of(tmp_path / "epoch=1.ckpt")) == 2
    fit(Net(), strategy, max_epochs=3, fit_arguments={"ckpt_path": tmp_path / "last-epoch=1.ckpt"}, **TWO_NODES)


def test_a_slow_save_does_not_delete_the_shards_of_the_next(tmp_path):
    path, may_end = tmp_path / "last.ckpt", threading.Event()

    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, *_):
            may_end.wait(60)

    io = AsyncCheckpointIO(Slow())
    before, own, following = (Path(sidecar_path(path, 3, identity)) for identity in ("before", "own", "following"))
    for sidecar in (before, own, following):
        sidecar.parent.mkdir(parents=True)
        sidecar.touch()
    following.parent.rename(tmp_path / "not yet")
    io.save_checkpoint({}, path)
    remove_replaced(io, path, "own")
    (tmp_path / "not yet").rename(following.parent)
    may_end.set()
    io.teardown()
    assert {*own.parents[1].iterdir()} == {own.parent, following.parent}


@pytest.mark.parametrize("io", [None, AsyncCheckpointIO], ids=["now", "overlapped"])
def test_a_checkpoint_that_replaces_another_brings_its_own_sidecars(fit, tmp_path, io):
    path = tmp_path / "last.ckpt"
    strategy = {"checkpoint_replicas": True, "checkpoint_io": io and io(), "ranks_per_node": 1}
    whole = fit(Net(), strategy, max_epochs=2, callbacks=[SaveAfter(2, path), SaveAfter(STEPS, path)], **TWO_NODES)
    assert sidecars_of(path) == [f"{identity_of(path)}/rank-{rank:04d}" for rank in range(2)]
    resumed = fit(Net(), strategy, max_epochs=2, fit_arguments={"ckpt_path": path}, **TWO_NODES)
    assert resumed[0]["report"] == whole[0]["report"][STEPS:]


class Fails(DurableCheckpointIO):
    """Fails, or dies, in the middle of a file of some rank."""

    def __init__(self, name: str, how: str) -> None:
        self.name, self.how = name, how
        self.saved = 0

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.saved += self.name in str(path)
        if self.name in str(path) and self.saved == 2:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(f"{path}.part").write_bytes(b"half")
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.fixture(scope="module")
def undisturbed(borrow):
    """Return the ranks' reports of a run whose synchronizations do not end its epochs."""

    def main(folder):
        scheme = PeriodicAveraging(4, at_epoch_end=False)
        strategy = HierarchicalStrategy(scheme, ranks_per_node=1, checkpoint_replicas=True)
        one_trainer(folder, strategy=strategy, **TWO_NODES).fit(module := Net())
        return module.report

    return borrow(main, ranks=2)


@pytest.mark.long("a run that is broken off in mid-save, and its resume, on forked ranks")
@pytest.mark.parametrize("how", ["dies", "finds no space"])
@pytest.mark.parametrize("name", ["rank-0001", "last.ckpt"], ids=["sidecar", "checkpoint"])
def test_the_last_checkpoint_stays_complete_until_the_next_one_is(fit, undisturbed, tmp_path, name, how):
    path = tmp_path / "last.ckpt"

    def strategy(io=None):
        scheme = PeriodicAveraging(4, at_epoch_end=False)
        return {"scheme": scheme, "checkpoint_replicas": True, "checkpoint_io": io, "ranks_per_node": 1}

    saves = [SaveAfter(STEPS, path), SaveAfter(2 * STEPS, path)]
    # rank 0 writes a sidecar and the checkpoint itself, whose name is in that of its sidecar, too
    io = Fails(name, how) if "rank" in name else FailsAtItself(name, how)
    with pytest.raises(Exception, match="No space left on device" if "space" in how else "SIGKILL"):
        fit(Net(), strategy(io), max_epochs=2, callbacks=saves, forked=True, **TWO_NODES)
    assert torch.load(path, weights_only=True)["global_step"] == STEPS
    again = {"fit_arguments": {"ckpt_path": path}, "callbacks": saves[1:]}
    resumed = fit(Net(), strategy(), max_epochs=2, **again, **TWO_NODES)
    assert resumed[1]["report"] == undisturbed[1][STEPS:]
    # what was left behind goes with the next one
    assert sidecars_of(path) == [f"{identity_of(path)}/rank-{rank:04d}" for rank in range(2)]


class FailsAtItself(Fails):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if Path(path).name == self.name:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            DurableCheckpointIO.save_checkpoint(self, checkpoint, path, storage_options)


def test_ranks_that_find_different_checkpoints_are_named(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    fit(Net(), callbacks=[callback], enable_checkpointing=True, **TWO_NODES)

    class Confused(HierarchicalStrategy):
        def load_checkpoint(self, checkpoint_path, weights_only=None):
            other = Path(checkpoint_path).with_name("step=4.ckpt")
            return super().load_checkpoint(other if self.global_rank == 1 else checkpoint_path, weights_only)

    with pytest.raises(Exception, match="rank 0 resumed from one of step 2, but rank 1 from one of step 4"):
        fit(
            Net(),
            Confused(ranks_per_node=2, start_method="fork"),
            fit_arguments={"ckpt_path": tmp_path / "step=2.ckpt"},
            forked=True,
            **TWO_NODES,
        )


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


def trained_noisily(fit, path, replicas: bool, resumed: bool):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 1:
                trainer.save_checkpoint(path)

    return fit(
        Noisy(),
        {"scheme": DASO(4, 1, 0, 0, plateau=Plateau(0, 0.0)), "checkpoint_replicas": replicas},
        max_epochs=3,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        callbacks=[] if resumed else [Saves()],
        fit_arguments={"ckpt_path": path} if resumed else {},
    )


@pytest.mark.parametrize("replicas", [True, False], ids=["sidecars", "plain checkpoint"])
def test_the_loss_so_far_the_scale_and_numpys_stream_go_on(fit, tmp_path, replicas):
    whole = trained_noisily(fit, tmp_path / "saved.ckpt", replicas, resumed=False)
    again = trained_noisily(fit, tmp_path / "saved.ckpt", replicas, resumed=True)
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
    whole, resumed = Drawing(shuffle), Drawing(shuffle)
    for module in (whole, resumed):
        strategy = HierarchicalStrategy("periodic", checkpoint_replicas=True)
        saves = [SaveAfter(2, tmp_path / "saved.ckpt")] if module is whole else []
        trainer = one_trainer(tmp_path, strategy=strategy, callbacks=saves, max_epochs=1, use_distributed_sampler=False)
        trainer.fit(module, ckpt_path=None if module is whole else tmp_path / "saved.ckpt")
    assert len(whole.report) == STEPS
    assert resumed.report == whole.report[2:]


# ---- without processes -----------------------------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path):
    """``load(rank, identity=..., nodes=..., module=...)`` for the sidecars of two ranks next to "saved.ckpt"."""

    @functools.cache
    def attached(rank, nodes, module):
        def work(own, world):
            meter = Meter()
            topology = Topology(nodes, own, world.connect(own, meter), meter)
            return TrainingRun(AllReduce(), Replicas(module, [torch.optim.Adam(module.parameters())]), topology)

        return ThreadWorld(sum(map(len, nodes))).run(work)[rank]

    usual = torch.nn.Linear(2, 2)

    def run(rank, identity="good", nodes=((0,), (1,)), module=None):
        own = attached(rank, nodes, module or usual)
        state = load_sidecar(DurableCheckpointIO(), tmp_path / "saved.ckpt", identity, own.topology)
        check_sidecar(state, own)
        return state

    for identity in ("good", "other"):
        for rank in range(2):
            state = sidecar_state(identity, attached(rank, ((0,), (1,)), usual), False)
            DurableCheckpointIO().save_checkpoint(state, sidecar_path(tmp_path / "saved.ckpt", rank, identity))
    return run


def test_a_sidecar_holds_the_state_of_its_rank(load):
    assert [load(rank)["rank"] for rank in range(2)] == [0, 1]


def is_refused(load, file: Path, message: str, error=ValueError, **arguments) -> None:
    with pytest.raises(error, match=message) as raised:
        load(1, **arguments)
    assert str(file) in str(raised.value)
    assert "Set checkpoint_replicas=False to resume from the averaged parameters instead." in str(raised.value)


def test_a_sidecar_of_another_place_is_refused(load, tmp_path):
    file = Path(sidecar_path(tmp_path / "saved.ckpt", 1, "good"))
    whole = file.read_bytes()
    is_refused(load, tmp_path / "saved.ckpt", "saved without checkpoint_replicas=True", identity=None)
    is_refused(load, file, r"saved by nodes \[\[0\], \[1\]\], but this run has \[\[0, 1\]\]", nodes=((0, 1),))
    is_refused(load, file, "another model: bias, weight are not the same", module=torch.nn.Linear(3, 3))
    file.write_bytes(Path(sidecar_path(tmp_path / "saved.ckpt", 0, "good")).read_bytes())
    is_refused(load, file, "saved by rank 0, not by rank 1")
    file.write_bytes(Path(sidecar_path(tmp_path / "saved.ckpt", 1, "other")).read_bytes())
    is_refused(load, file, "another checkpoint")
    file.unlink()
    is_refused(load, file, "is missing", FileNotFoundError)
    file.write_bytes(whole)
    assert load(1)["rank"] == 1


def test_a_sidecar_that_is_cut_off_or_not_one_is_refused(load, tmp_path):
    file = Path(sidecar_path(tmp_path / "saved.ckpt", 1, "good"))
    whole = file.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        is_refused(load, file, "cannot be read: ")
    for something in ([1, 2], {}, {"identity": "good"}):
        torch.save(something, file)
        is_refused(load, file, "is not a sidecar of a checkpoint")


@pytest.mark.parametrize(("number", "found"), [(None, "no format number"), (5, "format 5")])
def test_a_sidecar_of_another_format_is_refused(load, tmp_path, number, found):
    file = Path(sidecar_path(tmp_path / "saved.ckpt", 1, "good"))
    state = torch.load(file, weights_only=True)
    state["format"] = number
    torch.save(state, file)
    with pytest.raises(ValueError, match=r"^.* has .*\.$") as raised:
        load(1)
    assert str(raised.value) == (
        f"{file} has {found}, but this version of lightning-hiercomm reads only format 4. Set checkpoint_replicas=False"
        " to resume from the averaged parameters instead."
    )


def test_a_flipped_byte_anywhere_is_refused_or_changes_nothing(load, tmp_path):
    file = Path(sidecar_path(tmp_path / "saved.ckpt", 1, "good"))
    whole, expected = file.read_bytes(), checksum(load(1))
    refused = 0
    for place in range(0, len(whole), 211):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            same = checksum(load(1)) == expected  # it lay between the records
        except ValueError as error:
            same = str(file) in str(error)
            refused += 1
        assert same
    assert refused > len(whole) / 211 / 3


def test_a_checksum_is_of_every_kind_of_value():
    values = [None, 0, 0.0, False, "0", b"0", [], {}, [0], [[0]], {0: 0}, {"0": 0}, torch.zeros(1), torch.zeros(2)]
    values += [torch.zeros(()), torch.zeros(1, 1), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1).bool()]
    assert len({checksum(value) for value in values}) == len(values)
    assert checksum([torch.arange(6).view(2, 3).T]) == checksum([torch.arange(6).view(2, 3).T.contiguous()])
    assert checksum([float("nan")]) == checksum([float("nan")])


def test_the_random_stream_of_a_gpu_is_restored_under_any_index(monkeypatch):
    own, put_back = torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: own)
    monkeypatch.setattr(torch.cuda, "set_rng_state", put_back.append)
    state = random_state()
    set_random_state(state)
    assert put_back == [own]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    set_random_state(state)  # a resume without a GPU
    assert put_back == [own]


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (DiLoCo(4, fragments=["layers.0"]), DiLoCo(4, fragments=["layers.3"])),
    ],
    ids=repr,
)
def test_models_changed_by_other_arguments_are_refused(saved, now):
    def work(topology):
        module = Net()
        optimizer = module.configure_optimizers()["optimizer"]
        runs = [TrainingRun(scheme, Replicas(module, [optimizer]), topology) for scheme in (saved, now)]
        state = sidecar_state("1", runs[0], False) | {"path": "it"}
        check_sidecar(state, runs[0])
        with pytest.raises(ValueError, match=r"it was saved with .* but this run has"):
            check_sidecar(state, runs[1])
        for run in runs:
            run.close(timeout=5.0)

    on_ranks(work, [[0, 1], [2, 3]])


def test_other_settings_are_refused(fit, tmp_path):
    path = tmp_path / "saved.ckpt"
    strategy = {"scheme": PeriodicAveraging(4), "checkpoint_replicas": True, "ranks_per_node": 1}
    fit(Net(), strategy, callbacks=[SaveAfter(2, path)], **TWO_NODES)
    with pytest.raises(Exception, match=r"saved with .*bucket_mb=4.* but this run has .*bucket_mb=1,"):
        fit(
            Net(),
            {**strategy, "transport": Transport(bucket_mb=1)},
            fit_arguments={"ckpt_path": path},
            forked=True,
            **TWO_NODES,
        )
