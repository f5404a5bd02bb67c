"""Buffers and frozen parameters of other shapes on other ranks, such as memory banks, stay each rank's own."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from elastic_threads import ElasticRank, play
from harness import on_ranks, place
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from problems import one_trainer
from torch import nn
from torch.multiprocessing.spawn import ProcessException
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Gossip,
    HierarchicalFabricStrategy,
    HierarchicalStrategy,
    PeriodicAveraging,
    StepsDelay,
)
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas, per_rank_tensors
from lightning_hiercomm.run.shapes import unequal_tensors
from lightning_hiercomm.run.training_run import TrainingRun

SCHEMES = {
    "all_reduce": AllReduce,
    "periodic": partial(PeriodicAveraging, 2),
    "alone": partial(PeriodicAveraging, 2, gradients="none"),
    "daso": partial(DASO, 2, warmup_epochs=1, cooldown_epochs=0),
    "diloco": partial(DiLoCo, 2),
    "gossip": partial(Gossip, segments=2),
    "steps_delay": partial(StepsDelay, 2, warmup_steps=2),
}
LAYOUTS = {2: [(name, 2 if name == "alone" else 1) for name in SCHEMES], 4: [("all_reduce", 2), ("periodic", 2)]}
"""Schemes and ranks per node, by the number of ranks."""


class Plain(pl.LightningModule):
    """Has BatchNorm; ranks train on other samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) - self.global_rank).square().mean()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader:
        samples = torch.randn(16 * self.trainer.world_size, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(samples), batch_size=4)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.ones(2 * self.trainer.world_size, 4)), batch_size=2)


class Banks(Plain):
    """Fills banks at every moment of a fit; ``own`` is what this rank put into each, ``lost`` what changed since."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("set_up", "started", "grown", "cut", "one", "first", "validated", "saved_late", "ended"):
            self.register_buffer(name, torch.zeros(4))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("absent", None)
        self.register_buffer("labels", torch.zeros(4, dtype=torch.long))
        self.register_buffer("cached", torch.zeros(4), persistent=False)
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.own: dict[str, torch.Tensor] = {}
        self.lost: list[tuple[str, str]] = []

    def fill(self, name: str, length: int | None = None) -> None:
        """Put a bank of another length on every rank in the place of what was there."""
        rank = self.trainer.global_rank
        length = 2 + 3 * rank if length is None else length
        values = torch.full((length,), 10.0 + rank + len(self.own) / 8)
        if name == "labels":
            values = values.long()
        self.own[name] = values.clone()
        if name == "frozen":
            self.frozen = nn.Parameter(values, requires_grad=False)
        elif name in self._buffers:
            setattr(self, name, values)
        else:
            self.register_buffer(name, values)

    def compare(self, where: str) -> None:
        for name, values in self.own.items():
            held = getattr(self, name)
            if held.shape != values.shape or not torch.equal(held, values):
                self.lost.append((name, where))

    def setup(self, stage: str) -> None:
        self.fill("set_up")

    def on_fit_start(self) -> None:
        self.fill("started")

    def on_train_batch_start(self, *_: object) -> None:
        self.compare("a batch")

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        step = self.trainer.global_step
        self.fill("grown", (step + 1) * (self.global_rank + 1))
        self.fill("cut", 12 - step - self.global_rank)
        if step == 1:
            self.fill("late")
            self.fill("labels")
            self.fill("cached")
            if self.global_rank == 0:
                self.fill("first", 7)
            if self.global_rank == 1:
                self.fill("one", 7)
                self.fill("late_on_one", 3)
        elif step > 1 and self.global_rank != 0:
            self.first.fill_(step + self.global_rank)  # in place
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.fill("empty")
        self.fill("absent")
        self.fill("frozen")

    def on_validation_start(self) -> None:
        self.compare("a validation")
        self.fill("validated")

    def on_validation_end(self) -> None:
        self.fill("saved_late")

    def on_train_end(self) -> None:
        self.fill("ended")


def _of_net(module: pl.LightningModule) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.net.state_dict().items()}


def _fit_with_and_without_banks(devices: int, folder: Path) -> dict[str, Any]:
    """Under every scheme: what became of the banks, of a file, and of the rest of the module; and the warnings."""
    said = {}
    for name, ranks_per_node in LAYOUTS[devices]:
        modules = {}
        for kind in (Plain, Banks):
            saves = ModelCheckpoint(folder / f"{name} {kind.__name__}", save_last=True, every_n_train_steps=2)
            strategy = HierarchicalStrategy(SCHEMES[name](), ranks_per_node=ranks_per_node)
            more = {"val_check_interval": 2, "callbacks": [saves], "enable_checkpointing": True, "max_epochs": 2}
            modules[kind] = module = kind()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                one_trainer(folder, devices=devices, strategy=strategy, **more).fit(module)
        module.compare("the end")
        saved = torch.load(saves.last_model_path, weights_only=True)["state_dict"]
        said[name] = {
            "lost": module.lost,
            "first": module.first.clone(),
            "net": _of_net(module),
            "net without banks": _of_net(modules[Plain]),
            "saved": {bank: value.clone() for bank, value in saved.items() if not bank.startswith("net")},
            "own": module.own,
            "warned": [str(each.message) for each in caught if "another shape on other ranks" in str(each.message)],
        }
    return said


@pytest.fixture(scope="module")
def ranks(borrow: Any) -> dict[int, list[dict[str, Any]]]:
    return {devices: borrow(partial(_fit_with_and_without_banks, devices), devices) for devices in LAYOUTS}


RUNS = [(devices, name) for devices, runs in LAYOUTS.items() for name, _ in runs]


@pytest.mark.parametrize(("devices", "name"), RUNS)
def test_buffers_of_unequal_length_stay_local(ranks, devices, name):
    for rank in ranks[devices]:
        assert rank[name]["lost"] == []


@pytest.mark.parametrize(("devices", "name"), RUNS)
def test_buffers_of_unequal_length_change_nothing_else(ranks, devices, name):
    first = ranks[devices][0][name]
    for rank in ranks[devices]:
        for key, value in rank[name]["net"].items():
            if "num_batches" not in key:
                torch.testing.assert_close(value, rank[name]["net without banks"][key])
                assert torch.equal(value, first["net"][key]), key


@pytest.mark.parametrize(("devices", "name"), RUNS)
def test_a_checkpoint_holds_the_banks_of_rank_0(ranks, devices, name):
    own, saved = (ranks[devices][0][name][which] for which in ("own", "saved"))
    assert saved.keys() >= own.keys() - {"cached", "ended"}
    for bank in own.keys() - {"cached", "ended", "empty", "absent", "frozen"}:
        assert torch.equal(saved[bank], own[bank]), bank


@pytest.mark.parametrize(("devices", "name"), RUNS)
def test_each_bank_of_another_length_is_named_once_on_rank_0(ranks, devices, name):
    first, *others = (rank[name]["warned"] for rank in ranks[devices])
    assert others == [[]] * (devices - 1)
    text = " ".join(first)
    quiet = {"labels", "cached"}  # counts, and what no checkpoint holds
    for bank in {*ranks[devices][0][name]["own"], "one", "late_on_one"} - quiet - {"late"}:
        assert text.count(f"{bank} (") - text.count(f"_{bank} (") == 1, (bank, text)
    for bank in quiet:
        assert f"{bank} (" not in text
    assert "late (float32[2] on rank 0, float32[5] on rank 1)" in text
    assert "checkpoint holds those of rank 0" in text


class Grows(Plain):
    """Its banks grow in the first steps, and no optimizer trains them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(4))
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.report: list[Any] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        step = self.trainer.global_step
        if step < 3:
            values = torch.arange(float((step + 1) * (self.global_rank + 2))) + self.global_rank
            self.bank, self.frozen = values, nn.Parameter(values + 0.5, requires_grad=False)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: object) -> None:
        held = [self.bank.tolist(), self.frozen.tolist()]
        self.report.append([*held, *(p.flatten().tolist() for p in self.net.parameters())])


def _resumed(folder: Path) -> dict[str, Any]:
    """What a run reports that is resumed, and one that is not interrupted, after the file was saved."""
    said: dict[str, Any] = {}
    for name, wire in (("periodic", "bfloat16"), ("all_reduce", None), ("diloco", None)):
        for replicas in (True, False):
            place = folder / f"{name} {replicas}"
            reports = []
            for is_first in (True, False):
                strategy = HierarchicalStrategy(
                    SCHEMES[name](), ranks_per_node=1, wire_dtype=wire, checkpoint_replicas=replicas
                )
                saves = ModelCheckpoint(place, filename="{step}", every_n_train_steps=4, save_top_k=-1, save_last=False)
                callbacks = [saves] if is_first else []
                more = {"callbacks": callbacks, "enable_checkpointing": is_first, "max_epochs": 2}
                module = Grows()
                trainer = one_trainer(folder, devices=2, strategy=strategy, limit_val_batches=0, **more)
                trainer.fit(module, ckpt_path=None if is_first else place / "step=4.ckpt")
                reports.append(module.report[-4:])
            said[name, replicas] = reports
    return said


@pytest.fixture(scope="module")
def resumed(borrow: Any) -> list[dict[str, Any]]:
    return borrow(_resumed, 2)


def test_a_resume_with_replicas_restores_the_buffer_of_every_rank(resumed):
    for rank in resumed:
        for (_, replicas), (whole, after_resume) in rank.items():
            if replicas:
                assert after_resume == whole


def test_a_resume_without_replicas_uses_the_buffer_of_rank_0(resumed):
    one, other = resumed
    for how in one:
        if not how[1]:
            for rank in (one, other):
                assert rank[how][1][-1][:2] == one[how][0][-1][:2]


class Unequal(Plain):
    """A rank has another head, or freezes it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        head = nn.Linear(1, 2 + (self.how == "shape" and self.trainer.global_rank == 1))
        head.requires_grad_(self.how != "frozen" or self.trainer.global_rank == 0)
        if self.how != "missing" or self.trainer.global_rank == 0:
            self.head = head


@pytest.mark.parametrize(
    ("how", "difference"),
    [
        ("shape", r"head.weight: float32\[2, 1\] on rank 0, float32\[3, 1\] on rank 1"),
        ("frozen", "head.weight: trained on rank 0, frozen on rank 1"),
        ("missing", r"head.weight: float32\[2, 1\] on cpu on rank 0, missing on rank 1"),
    ],
)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_trainable_parameters_that_differ_are_refused_before_training(fit, how, difference, ranks_per_node):
    with pytest.raises(ProcessException, match=f"ValueError: parameter {difference}"):
        fit(Unequal(how), {"scheme": AllReduce(), "ranks_per_node": ranks_per_node}, devices=2)


def test_every_rank_refuses_trainable_parameters_that_differ():
    def work(topology: Topology) -> str:
        module = nn.Linear(1, 1 + topology.rank)
        with pytest.raises(ValueError, match=r"parameter weight: float32\[1, 1\] on rank 0") as refused:
            per_rank_tensors(module, topology.world, torch.device("cpu"), True)
        return str(refused.value)

    said = on_ranks(work, [[0], [1], [2]])
    assert said == [said[0]] * 3


@pytest.mark.parametrize(
    ("count", "difference"),
    [(1, "rank 0 has 1 optimizers, rank 1 has 2"), (2, r"optimizer 0 has first.weight .*rank 0, second.weight")],
)
def test_ranks_whose_optimizers_train_other_parameters_are_refused(count, difference):
    def work(topology: Topology) -> None:
        module = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
        layers = list(module.values())[:: 1 if topology.rank == 0 else -1]
        optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in layers]
        if count == 1 and topology.rank == 0:
            del optimizers[1]
        with pytest.raises(ValueError, match=f"ranks train different parameters: {difference}"):
            TrainingRun(PeriodicAveraging(1), Replicas(module, optimizers), topology)

    on_ranks(work, [[0], [1]])


def test_tensors_of_unequal_shapes_or_types_are_found():
    def work(topology: Topology) -> list[Any]:
        module = nn.BatchNorm1d(2)
        module.register_buffer("bank", torch.zeros(1 + topology.rank))
        module.register_buffer("types", torch.zeros(1, dtype=[torch.float32, torch.float64][topology.rank]))
        cpu = torch.device("cpu")
        unequal, _ = unequal_tensors(module, topology.world, cpu)
        known, replaced = unequal_tensors(module, topology.world, cpu, unequal, replaced=[(topology.rank, 1)])
        return [unequal, known, replaced]

    expected = {"bank": ["float32[1] on cpu", "float32[2] on cpu"], "types": ["float32[1] on cpu", "float64[1] on cpu"]}
    assert on_ranks(work, [[0], [1]]) == [[expected, {}, {(0, 1), (1, 1)}]] * 2


def _trained_with_a_bank(topology: Topology, scheme: Any, **more: Any) -> list[Any]:
    """Rank 1 replaces its bank before the second of three steps, rank 0 writes to its own; statistics move, too."""
    module = nn.BatchNorm1d(1).to(place.device)
    module.register_buffer("bank", torch.zeros(2, device=place.device))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    run = TrainingRun(scheme, Replicas(module, [optimizer]), topology, **more)
    seen = []
    try:
        run.begin(1, 3)
        run.begin_epoch(0, dict)
        for step in range(3):

            def train(step: int = step) -> None:
                module.running_mean.fill_(step + 2.0 * topology.rank)
                module.bank[0] = step + 1.0
                if step == 1 and topology.rank == 1:
                    module.bank = torch.full((3,), 7.0, device=place.device)
                for parameter in module.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()

            run.step(optimizer, train)
            seen.append([module.running_mean.item(), module.bank.tolist()])
        run.finish()
        run.averaged_model.average_module()
    finally:
        run.close(timeout=5.0)
    return [*seen, module.bank.tolist()]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("on_nonfinite", ["raise", "ignore"])
@pytest.mark.parametrize("scheme", [PeriodicAveraging(1), PeriodicAveraging(1, gradients="none"), DiLoCo(1)], ids=repr)
def test_a_synchronization_averages_no_bank_that_one_rank_has_replaced(scheme, on_nonfinite):
    """The other ranks keep their own from that synchronization on, and statistics are averaged as before."""
    nodes = [[0, 1]] if scheme.gradients == "none" else [[0], [1]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, other = on_ranks(lambda topology: _trained_with_a_bank(topology, scheme, on_nonfinite=on_nonfinite), nodes)
    assert one == [[1.0, [1.0, 0.0]], [2.0, [2.0, 0.0]], [3.0, [3.0, 0.0]], [3.0, 0.0]]
    assert other == [[1.0, [1.0, 0.0]], [2.0, [7.0, 7.0, 7.0]], [3.0, [3.0, 7.0, 7.0]], [3.0, 7.0, 7.0]]


@pytest.mark.usefixtures("device")
def test_nan_in_a_buffer_is_averaged_without_checks():
    def work(topology: Topology) -> list[float]:
        module = nn.Linear(1, 1).to(place.device)
        module.register_buffer("mean", torch.zeros(2, device=place.device))
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        run = TrainingRun(PeriodicAveraging(1), Replicas(module, [optimizer]), topology, on_nonfinite="ignore")
        try:
            run.begin(1, 1)
            run.begin_epoch(0, dict)

            def train() -> None:
                module.mean[0] = torch.nan if topology.rank else 1.0
                module.mean[1] = topology.rank
                for parameter in module.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()

            run.step(optimizer, train)
            return module.mean.tolist()
        finally:
            run.close(timeout=5.0)

    for first, second in on_ranks(work, [[0], [1]]):
        assert first != first
        assert second == 0.5


class Unfreezes(Grows):
    """Trains its first layer from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


def _unfrozen(folder: Path) -> list[Any]:
    reports = []
    for name in ("all_reduce", "periodic"):
        module = Unfreezes()
        strategy = HierarchicalStrategy(SCHEMES[name](), ranks_per_node=2)
        one_trainer(folder, devices=4, strategy=strategy, max_epochs=2).fit(module)
        reports.append(module.report[-1])
    return reports


def test_parameters_are_unfrozen_with_banks_of_other_lengths(borrow):
    """DDP is made again then, and broadcasts what the module holds."""
    for rank, reports in enumerate(borrow(_unfrozen, 4)):
        for bank, frozen, *_ in reports:
            assert bank == (torch.arange(3.0 * (rank + 2)) + rank).tolist()
            assert len(frozen) == len(bank)


class OwnFromTheStart(Plain):
    """Every rank makes a bank of its own length."""

    def __init__(self) -> None:
        super().__init__()
        rank = int(os.environ["LOCAL_RANK"])
        self.register_buffer("bank", torch.full((2 + rank,), float(rank)))


def _saved_with_averages(folder: Path) -> list[Any]:
    module = OwnFromTheStart()
    strategy = HierarchicalStrategy(PeriodicAveraging(2), ranks_per_node=1)
    saves = ModelCheckpoint(folder, save_last=True)
    more = {"callbacks": [saves, EMAWeightAveraging(decay=0.5)], "enable_checkpointing": True, "val_check_interval": 2}
    one_trainer(folder, devices=2, strategy=strategy, **more).fit(module)
    saved = torch.load(saves.last_model_path, weights_only=True)
    return [module.bank.tolist(), saved["state_dict"]["bank"].tolist(), saved["state_dict"]["net.0.weight"].tolist()]


def test_averages_of_weights_are_saved_with_banks_of_other_lengths(borrow):
    (one, saved, weight), (other, _, same_weight) = borrow(_saved_with_averages, 2)
    assert one == saved == [0.0] * 2
    assert other == [1.0] * 3
    assert weight == same_weight


def _averaged_where_named(folder: Path) -> list[list[str]]:
    said = []
    for average_buffers in (True, False, ["*mean"], ["ban*"]):
        strategy = HierarchicalStrategy(PeriodicAveraging(2), ranks_per_node=1, average_buffers=average_buffers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            one_trainer(folder, devices=2, strategy=strategy, max_epochs=1, limit_val_batches=0).fit(Grows())
        said.append([str(each.message) for each in caught if "another shape" in str(each.message)])
    return said


def test_a_bank_is_named_only_where_it_would_be_averaged(borrow):
    first, other = borrow(_averaged_where_named, 2)
    assert other == [[]] * 4
    by_default, by_none, by_others, by_name = (" ".join(each) for each in first)
    for text in (by_default, by_name):
        assert "bank (float32[6] on rank 0, float32[9] on rank 1)" in text
    for text in (by_none, by_others):
        assert "bank (" not in text
        assert "frozen (" in text
    assert "average_buffers names" not in by_default
    assert "average_buffers names some of them without effect" in by_name


def test_the_process_that_forked_the_ranks_gets_the_bank_of_rank_0(tmp_path):
    module = Grows()
    strategy = HierarchicalStrategy(PeriodicAveraging(2), ranks_per_node=1, start_method="fork")
    one_trainer(tmp_path, devices=2, strategy=strategy, max_epochs=1, limit_val_batches=0).fit(module)
    assert module.bank.tolist() == torch.arange(6.0).tolist()


def _trained_on_fabric(ranks_per_node: int, folder: Path) -> dict[str, Any]:
    said = {}
    for name in ("all_reduce", "periodic", "diloco"):
        strategy = HierarchicalFabricStrategy(SCHEMES[name](), ranks_per_node=ranks_per_node)
        fabric = Fabric(accelerator="cpu", devices=2 * ranks_per_node, strategy=strategy)
        fabric.launch()
        rank = fabric.global_rank
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        module.register_buffer("bank", torch.zeros(4))
        module.register_buffer("made_before", torch.zeros(2 + rank))
        teacher = nn.Linear(1, 1)
        teacher.register_buffer("bank", torch.zeros(2 + rank))
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        fabric.setup(teacher)
        steps = 0
        for _ in strategy.epochs(2):
            for _ in range(3):
                steps += 1
                module.bank = torch.full((steps * (rank + 1),), float(rank))
                fabric.backward(model(torch.full((2, 4), rank + 1.0) + torch.eye(2, 4)).square().sum())
                optimizer.step()
                optimizer.zero_grad()
            with strategy.averaged_model():
                assert len(module.bank) == steps * (rank + 1)
        fabric.save(folder / "saved.ckpt", {"model": module})
        saved = torch.load(folder / "saved.ckpt", weights_only=True)["model"]
        said[name] = [module.bank.tolist(), saved["bank"].tolist(), [p.tolist() for p in module.parameters()]]
    return said


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_buffers_of_unequal_length_stay_local_on_fabric(borrow, ranks_per_node):
    ranks = borrow(partial(_trained_on_fabric, ranks_per_node), 2 * ranks_per_node)
    for rank, said in enumerate(ranks):
        for name, (bank, saved, parameters) in said.items():
            assert bank == [float(rank)] * 6 * (rank + 1)
            assert saved == [0.0] * 6
            assert parameters == ranks[0][name][2]


def test_elastic_nodes_average_the_buffers_that_they_began_with():
    """Whatever shapes a node's own have got, when parameters are unfrozen, or when it joins others."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("bank", torch.ones(4))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    replicas = Replicas(module, [optimizer])
    replicas.fix_slots()
    before = replicas.of(optimizer)
    module.bank = torch.ones(7)
    module.register_buffer("late", torch.ones(3))
    after = replicas.of(optimizer)
    assert after.layout == before.layout
    assert [buffer.tolist() for buffer in before.buffers if len(buffer) == 4] == [[1.0] * 4]
    assert [buffer.tolist() for buffer in after.buffers if len(buffer) == 4] == [[0.0] * 4]
    assert any(buffer is module[1].running_mean for buffer in after.buffers)


@pytest.mark.parametrize("scheme", [PeriodicAveraging(1), DiLoCo(1)], ids=repr)
def test_elastic_nodes_give_up_a_buffer_that_one_of_them_has_replaced(scheme):
    def work(elastic: ElasticRank) -> list[float]:
        elastic.join()
        module, seen = elastic.rank.module, []
        for step in range(3):
            module.buffer.fill_(step + float(elastic.node))
            if step == 1 and elastic.node == "1":
                module.buffer = torch.full((5,), 9.0)
            elastic.scheme.replica.find_buffers()
            elastic.step()
            seen.append(module.buffer.mean().item())
        return seen

    results = play(scheme, work, buffer=torch.zeros(3), targets=(0.0, 0.0))
    assert results["0", 0] == [0.5, 1.0, 2.0]
    assert results["1", 0] == [0.5, 9.0, 3.0]
