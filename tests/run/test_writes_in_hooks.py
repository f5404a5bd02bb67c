"""Parameters that hooks write during a validation or a save are kept on all ranks, as DDP keeps them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import on_ranks
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from pairwise import requested
from problems import one_trainer, warnings_with
from torch import nn
from torch.utils.data import DataLoader

from lightning_hiercomm import DASO, AllReduce, DiLoCo, Gossip, HierarchicalStrategy, PeriodicAveraging, StepsDelay
from lightning_hiercomm.elastic.topology import ElasticTopology
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import Replicas, broadcast_values
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import OuterOptimizer, ParameterSync
from lightning_hiercomm.schemes.reducers.graphs import RandomPermutation

SCHEMES = {
    "all_reduce": AllReduce,
    "periodic": partial(PeriodicAveraging, 4),
    "every step": partial(PeriodicAveraging, 1),
    "daso": partial(DASO, 2, warmup_epochs=0, cooldown_epochs=0),
    "eq1": partial(ParameterSync, schedule=4, staleness=2, merge="eq1"),
    "steps_delay": partial(StepsDelay, 2, warmup_steps=2),
    "gossip": partial(Gossip, segments=2),
    "overlapped gossip": partial(Gossip, segments=2, overlap=True),
    "diloco": partial(DiLoCo, 4),
    "streaming": partial(DiLoCo, 4, fragments=2, staleness=1, keep_local=0.5),
    "noloco": partial(ParameterSync, schedule=4, reducer=RandomPermutation(), merge=OuterOptimizer()),
}


class Written(pl.LightningModule):
    """Trains ``moves`` towards the rank; ``still`` is trained, too, but has a learning rate of zero.

    Args:
        writes: What is written in the validation of each number.
    """

    def __init__(self, writes: dict[int, str]) -> None:
        super().__init__()
        self.moves = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.still = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.teacher = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(1, affine=False)
        self.writes = writes
        self.validations = 0
        self.validated: dict[str, torch.Tensor] = {}
        self.before: dict[str, torch.Tensor] = {}
        self.report: dict[int, Any] = {}

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.state_dict().items()}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.norm(batch + self.global_rank)
        if self.validated:
            self.report[self.validations] = self.before, self.validated, self.after
            self.validated = {}
        return (self.moves - self.global_rank - 1).square().sum() + self.still.square().sum()

    def on_train_batch_start(self, *_: object) -> None:
        self.after = self.state()  # before DDP broadcasts buffers

    def on_train_batch_end(self, *_: object) -> None:
        with torch.no_grad():
            self.teacher.fill_(10.0 * self.global_rank)
        self.before = self.state()

    def write(self, hook: str) -> None:
        """Write what belongs to the present validation in this hook."""
        how, value = self.writes.get(self.validations, ""), 10.0 * self.validations
        if how == hook:
            with torch.no_grad():
                self.still.fill_(value)
        elif (how, hook) == ("data", "on_validation_epoch_end"):
            self.still.data = torch.full_like(self.still, value)
        elif (how, hook) == ("state", "on_validation_epoch_start"):
            self.load_state_dict({**self.state_dict(), "still": torch.full((3,), value)})
        elif (how, hook) == ("rank 0 alone", "on_validation_end") and self.global_rank == 0:
            self.still.data.fill_(value)
        elif (how, hook) == ("by rank", "on_validation_end"):
            self.still.data.fill_(value + self.global_rank)
        elif (how, hook) == ("statistics", "on_validation_end"):
            self.norm.running_mean.fill_(value)
        elif (how, hook) == ("teacher", "on_validation_end"):
            self.teacher.fill_(value)

    def on_validation_start(self) -> None:
        self.validations += not self.trainer.sanity_checking
        self.write("on_validation_start")

    def on_validation_epoch_start(self) -> None:
        self.write("on_validation_epoch_start")

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated = self.state()
        self.log("val_loss", self.moves.sum(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.write("on_validation_epoch_end")

    def on_validation_end(self) -> None:
        self.write("on_validation_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [self.moves]}, {"params": [self.still], "lr": 0.0}], lr=0.05)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(2 * 30 * self.trainer.world_size, 1), batch_size=2)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(self.trainer.world_size, 1))


class Restores(pl.Callback):
    """A callback that puts weights back in its hooks."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Written) -> None:
        pl_module.write("a callback's on_validation_end")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Written) -> None:
        if not trainer.sanity_checking:
            pl_module.validations += 1
            pl_module.write("a callback's on_validation_start")
            pl_module.validations -= 1


WRITES = {
    2: "on_validation_start",
    3: "state",
    4: "data",
    5: "on_validation_end",
    6: "a callback's on_validation_start",
    7: "a callback's on_validation_end",
    9: "rank 0 alone",
    10: "by rank",
    11: "statistics",
    12: "teacher",
    13: "on_validation_epoch_end",
}
ALIKE = [number for number, how in WRITES.items() if how not in ("rank 0 alone", "by rank", "statistics", "teacher")]


def _program(ranks_per_node: int, names: Sequence[str], folder: Path) -> dict[str, Any]:
    said = {}
    for name in names:
        strategy = HierarchicalStrategy(SCHEMES[name](), ranks_per_node=ranks_per_node)
        module = Written(WRITES)
        more = {"max_epochs": 1, "val_check_interval": 2, "callbacks": [Restores()], "num_sanity_val_steps": 1}
        with warnings_with("in a validation hook") as warned:
            one_trainer(folder, devices=2, strategy=strategy, **more).fit(module)
        said[name] = {"report": module.report, "end": module.state(), "warned": warned}
    return said


@pytest.fixture(scope="module")
def ranks(borrow: Any, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return borrow(partial(_program, 1, _requested(request)), 2)


def _requested(request: pytest.FixtureRequest) -> list[str]:
    return [name for name in SCHEMES if (name,) in requested(request, "name")]


VARIANTS = {"every step", "eq1", "overlapped gossip", "streaming"}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.nightly] * (name in VARIANTS)) for name in SCHEMES])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_equal_writes_in_a_validation_hook_are_kept(ranks, name):
    for rank in ranks:
        for number in ALIKE:
            _, _, after = rank[name]["report"][number]
            assert after["still"].tolist() == [10.0 * number] * 3, WRITES[number]
        assert rank[name]["end"]["still"].tolist() == [130.0] * 3


def test_all_ranks_go_on_from_the_validated_model_after_a_write(ranks, name):
    one, other = (rank[name]["report"] for rank in ranks)
    for number in [*ALIKE, 9, 10]:
        for _, validated, after in (one[number], other[number]):
            assert torch.equal(after["moves"], validated["moves"])
        assert torch.equal(one[number][2]["moves"], other[number][2]["moves"])


def test_where_ranks_write_other_values_those_of_rank_0_are_kept(ranks, name):
    for number in (9, 10):
        for rank in ranks:
            assert rank[name]["report"][number][2]["still"].tolist() == [10.0 * number] * 3
    first, other = (rank[name]["warned"] for rank in ranks)
    assert len(first) == 2
    assert all("ranks wrote different values to parameters in a validation hook (still)" in text for text in first)
    assert other == []


def test_without_a_write_each_rank_goes_on_from_its_own(ranks, name):
    for rank in ranks:
        for number in (1, 8, 14):
            before, _, after = rank[name]["report"][number]
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)


def test_statistics_written_in_a_validation_hook_are_kept(ranks, name):
    for rank in ranks:
        before, _, after = rank[name]["report"][11]
        assert after["norm.running_mean"].tolist() == [110.0]
        assert torch.equal(before["moves"], after["moves"])


def test_a_teacher_written_in_a_validation_hook_is_kept(ranks, name):
    for rank in ranks:
        before, _, after = rank[name]["report"][12]
        assert after["teacher"].tolist() == [120.0] * 2
        assert torch.equal(before["moves"], after["moves"])


def test_all_ranks_of_a_node_keep_the_written_values(borrow):
    for rank in borrow(partial(_of_nodes, {2: "on_validation_end", 3: "rank 0 alone"}), 4):
        for said in rank.values():
            for number in (2, 3):
                assert said["report"][number][2]["still"].tolist() == [10.0 * number] * 3


def _of_nodes(writes: dict[int, str], folder: Path) -> dict[str, Any]:
    said = {}
    for name in ("all_reduce", "periodic"):
        module = Written(writes)
        strategy = HierarchicalStrategy(SCHEMES[name](), ranks_per_node=2)
        one_trainer(folder, devices=4, strategy=strategy, max_steps=9, val_check_interval=2).fit(module)
        said[name] = {"report": module.report}
    return said


class SwapsItself(Written):
    """Validates an average of its weights, which it keeps itself, and which differs between ranks."""

    def on_train_batch_end(self, *_: object) -> None:
        super().on_train_batch_end()
        now = torch.cat([self.moves.detach(), self.still.detach()])
        self.average = now if self.global_step == 1 else self.average.lerp(now, 0.1)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.trained = self.moves.detach().clone()
        self.moves.data.copy_(self.average[:3])

    def on_validation_end(self) -> None:
        self.moves.data.copy_(self.trained)


def _swapped(folder: Path) -> list[tuple[Any, list[str]]]:
    said = []
    for kind, averages in ((SwapsItself, []), (Written, [EMAWeightAveraging(decay=0.5)])):
        module = kind({})
        strategy = HierarchicalStrategy(PeriodicAveraging(100, at_epoch_end=False), ranks_per_node=1)
        saves = ModelCheckpoint(folder / kind.__name__, every_n_train_steps=2, save_top_k=-1)
        more = {"max_steps": 9, "val_check_interval": 2, "callbacks": [saves, *averages], "enable_checkpointing": True}
        with warnings_with("validation hook") as warned:
            one_trainer(folder, devices=2, strategy=strategy, **more).fit(module)
        said.append((module.report, warned))
    return said


def test_weights_that_are_swapped_in_and_out_are_not_written(borrow):
    for rank in borrow(_swapped, 2):
        for report, warned in rank:
            assert warned == []
            assert len(report) == 4
            for before, validated, after in report.values():
                assert torch.equal(before["moves"], after["moves"])
                assert not torch.equal(validated["moves"], after["moves"])


class Sane(Written):
    """Writes in the sanity check, before training."""

    def on_validation_end(self) -> None:
        if self.trainer.sanity_checking:
            self.still.data.fill_(3.0)
        elif self.trainer.state.fn == "validate":
            self.still.data.fill_(4.0 + self.global_rank)


def _outside_of_training(folder: Path) -> list[Any]:
    module = Sane({})
    strategy = HierarchicalStrategy(PeriodicAveraging(4), ranks_per_node=1)
    trainer = one_trainer(folder, devices=2, strategy=strategy, max_steps=5, num_sanity_val_steps=1)
    trainer.fit(module)
    fitted = module.still.tolist()
    trainer.validate(module, verbose=False)
    return [fitted, module.still.tolist()]


def test_writes_in_a_sanity_check_or_outside_fit_are_kept(borrow):
    for rank, said in enumerate(borrow(_outside_of_training, 2)):
        assert said == [[3.0] * 3, [4.0 + rank] * 3]


def _saved_with_replicas(folder: Path) -> list[str]:
    module = Written({2: "on_validation_start"})
    strategy = HierarchicalStrategy(PeriodicAveraging(4), ranks_per_node=1, checkpoint_replicas=True)
    saves = ModelCheckpoint(folder, monitor="val_loss", mode="max", save_top_k=-1)
    more = {"max_steps": 9, "val_check_interval": 2, "callbacks": [saves], "enable_checkpointing": True}
    with warnings_with("in a validation hook") as warned:
        one_trainer(folder, devices=2, strategy=strategy, **more).fit(module)
    return warned


def test_a_replica_checkpoint_older_than_a_write_warns(borrow):
    first, other = borrow(_saved_with_replicas, 2)
    assert len(first) == 1
    assert "were written in a validation hook (still) during which a checkpoint was saved" in first[0]
    assert other == []


class WrittenInSaves(Written):
    """Writes in ``on_save_checkpoint``, with the number of the checkpoint for that of the validation."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.validated = self.state()
        self.write("on_save_checkpoint")
        for hook in ("on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end"):
            self.write(hook)


class Saves(pl.Callback):
    """Saves a checkpoint after every second batch, and writes in its own hook."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Written, batch: torch.Tensor, batch_idx: int
    ) -> None:
        if batch_idx % 2 == 0 and batch_idx > 0:
            pl_module.validations += 1
            trainer.save_checkpoint(self.folder / f"{pl_module.validations}.ckpt")

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Written, checkpoint: dict[str, Any]) -> None:
        pl_module.write("a callback's on_save_checkpoint")


WRITES_IN_SAVES = {
    2: "on_save_checkpoint",
    3: "state",
    4: "data",
    5: "a callback's on_save_checkpoint",
    7: "rank 0 alone",
    8: "by rank",
    9: "statistics",
    10: "teacher",
    12: "on_save_checkpoint",
}


def _saving_program(ranks_per_node: int, names: Sequence[str], folder: Path) -> dict[str, Any]:
    said = {}
    for name in names:
        strategy = HierarchicalStrategy(SCHEMES[name](), ranks_per_node=ranks_per_node)
        module, place = WrittenInSaves(WRITES_IN_SAVES), folder / name
        more = {"devices": 2, "max_epochs": 1, "limit_val_batches": 0, "callbacks": [Saves(place)]}
        with warnings_with("on_save_checkpoint") as warned:
            one_trainer(folder, strategy=strategy, **more).fit(module)
        files = {n: torch.load(place / f"{n}.ckpt", weights_only=True)["state_dict"] for n in (1, *WRITES_IN_SAVES)}
        said[name] = {"report": module.report, "end": module.state(), "warned": warned, "files": files}
    return said


@pytest.fixture(scope="module")
def saving_ranks(borrow: Any, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return borrow(partial(_saving_program, 1, _requested(request)), 2)


def test_equal_writes_in_on_save_checkpoint_are_kept(saving_ranks, name):
    for rank in saving_ranks:
        for number in (2, 3, 4, 5, 12):
            _, saved, after = rank[name]["report"][number]
            assert after["still"].tolist() == [10.0 * number] * 3, WRITES_IN_SAVES[number]
            assert torch.equal(after["moves"], saved["moves"])
        assert rank[name]["end"]["still"].tolist() == [120.0] * 3


def test_a_checkpoint_holds_the_values_that_rank_0_writes_while_saving(saving_ranks, name):
    files = saving_ranks[0][name]["files"]
    for number in (2, 3, 5, 7, 8, 12):  # torch saves what is written to the tensors that it has collected
        assert files[number]["still"].tolist() == [10.0 * number] * 3, WRITES_IN_SAVES[number]
    assert files[4]["still"].tolist() == [30.0] * 3
    assert files[9]["norm.running_mean"].tolist() == [90.0]
    assert files[10]["teacher"].tolist() == [100.0] * 2


def test_where_ranks_write_other_values_in_a_save_rank_0_counts(saving_ranks, name):
    one, other = (rank[name]["report"] for rank in saving_ranks)
    for number in (7, 8):
        assert one[number][2]["still"].tolist() == other[number][2]["still"].tolist() == [10.0 * number] * 3
        assert torch.equal(one[number][2]["moves"], other[number][2]["moves"])
    first, second = (rank[name]["warned"] for rank in saving_ranks)
    assert len(first) == 2
    assert all("ranks wrote different values to parameters in on_save_checkpoint (still)" in text for text in first)
    assert second == []


def test_a_save_without_a_write_changes_nothing(saving_ranks, name):
    for rank in saving_ranks:
        for number in (1, 6, 11, 13):
            before, _, after = rank[name]["report"][number]
            assert all(torch.equal(before[key], after[key]) for key in before)


def test_buffers_and_teachers_written_in_a_save_are_kept(saving_ranks, name):
    for rank in saving_ranks:
        for number in (9, 10):
            before, _, after = rank[name]["report"][number]
            assert torch.equal(before["moves"], after["moves"])
        assert rank[name]["report"][9][2]["norm.running_mean"].tolist() == [90.0]
        assert rank[name]["report"][10][2]["teacher"].tolist() == [100.0] * 2


def test_ranks_of_one_node_keep_values_written_while_saving(borrow):
    for rank in borrow(partial(_saving_program, 2, ["all_reduce", "periodic"]), 2):
        for said in rank.values():
            for number in (2, 3, 4, 5, 7, 8, 12):
                assert said["report"][number][2]["still"].tolist() == [10.0 * number] * 3


@pytest.mark.parametrize("scheme", ["periodic", "diloco", "steps_delay"])
def test_training_goes_on_after_a_write_in_inference_mode(scheme):
    """In which Lightning validates with nccl."""

    def work(topology: Topology) -> list[float]:
        module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(module.weight)
        module.register_buffer("bank", torch.zeros(1))
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        run = TrainingRun(SCHEMES[scheme](), Replicas(module, [optimizer]), topology)
        try:
            run.begin(1, 12)
            run.begin_epoch(0, dict)
            for step in range(12):

                def train() -> None:
                    module.weight.grad = torch.full_like(module.weight, -1.0 - topology.rank)
                    optimizer.step()

                run.step(optimizer, train)
                if step == 5:
                    with torch.inference_mode():
                        run.hook_writes.begin_validation()
                        module.weight.data.fill_(100.0)
                        run.hook_writes.end_validation(lambda tensors: broadcast_values(tensors, topology.world))
                    assert module.weight.item() == 100.0
                    module.bank = torch.zeros(2 + topology.rank)
            run.finish()
            return module.weight.flatten().tolist()
        finally:
            run.close(timeout=5.0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, other = on_ranks(work, [[0], [1]])
    assert one == other
    assert one[0] > 105.0


def test_elastic_nodes_undo_writes_in_hooks_and_warn():
    def work(own: Topology) -> float:
        topology, module = ElasticTopology(own), nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        run = TrainingRun(PeriodicAveraging(2), Replicas(module, [optimizer]), topology)
        try:
            before = module.weight.item()
            run.hook_writes.begin_validation()
            module.weight.data.fill_(100.0)
            with pytest.warns(UserWarning, match=r"written to parameters in a validation hook \(weight\) is undone"):
                run.hook_writes.end_validation(lambda tensors: None)
            return module.weight.item() - before
        finally:
            run.close(timeout=5.0)

    assert on_ranks(work, [[0]]) == [0.0]
