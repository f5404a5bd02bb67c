"""Parameters and averaged buffers whose shapes differ between ranks are refused; other buffers stay each rank's own."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import on_ranks
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from problems import one_trainer
from torch import nn
from torch.multiprocessing.spawn import ProcessException
from torch.utils.data import DataLoader, TensorDataset
from zoo import ZOO

from lightning_hiercomm import AllReduce, HierarchicalFabricStrategy, HierarchicalStrategy, PeriodicAveraging
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import own_tensors

LEFT_OUT = ["*running_*"]


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
    """Every rank has a bank of its own length, of samples, of labels and of values that are computed."""

    def __init__(self) -> None:
        super().__init__()
        rank = int(os.environ["LOCAL_RANK"])
        for name in ("bank", "labels", "computed"):
            self.register_buffer(name, self.values(rank, 2 + rank, name), persistent=name != "computed")
        self.seen: list[Any] = []

    @staticmethod
    def values(rank: int, length: int, name: str) -> torch.Tensor:
        values = torch.full((length,), 10.0 + rank)
        return values.long() if name == "labels" else values

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen.append([len(self.bank), len(self.labels), len(self.computed)])
        length = 3 + self.trainer.global_step + self.global_rank
        for name in ("bank", "labels", "computed"):
            setattr(self, name, self.values(self.global_rank, length, name))
        return super().training_step(batch, batch_idx)


def _fit_with_and_without_banks(name: str, replicas: bool, ranks_per_node: int, folder: Path) -> dict[str, Any]:
    """What became of the banks, of a file, and of the rest of the module; and what a resumed run began with."""
    modules = [Plain(), Banks(), Banks()]
    for module, is_resumed in zip(modules, (False, False, True), strict=True):
        strategy = HierarchicalStrategy(
            ZOO[name], ranks_per_node=ranks_per_node, average_buffers=LEFT_OUT, checkpoint_replicas=replicas
        )
        saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        more = {"val_check_interval": 2, "max_epochs": 2, "enable_checkpointing": type(module) is Banks}
        callbacks = [saves] if type(module) is Banks else []
        trainer = one_trainer(folder, devices=2, strategy=strategy, callbacks=callbacks, **more)
        trainer.fit(module, ckpt_path=folder / "step=4.ckpt" if is_resumed else None)
    _, module, resumed = modules
    saved = torch.load(folder / "step=4.ckpt", weights_only=True)["state_dict"]
    return {
        "lengths": module.seen,
        "resumed": resumed.seen[0],
        "bank": module.bank.tolist(),
        "saved": saved["bank"].tolist(),
        "net": [{key: each.clone() for key, each in m.net.state_dict().items()} for m in modules[:2]],
    }


@pytest.mark.pairwise(groups=[("name",), ("replicas",), ("ranks_per_node",)])
@pytest.mark.parametrize("name", ["all_reduce", "periodic", "diloco"])
@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_buffers_that_are_left_out_stay_each_ranks_own(borrow, name, replicas, ranks_per_node):
    ranks = borrow(partial(_fit_with_and_without_banks, name, replicas, ranks_per_node), 2)
    for rank, found in enumerate(ranks):
        assert found["lengths"] == [[2 + rank + step] * 3 for step in range(8)]
        assert found["bank"] == [10.0 + rank] * (10 + rank)
        assert found["saved"] == [10.0] * 6
        own = 6 + rank
        assert found["resumed"] == ([own] * 3 if replicas else [6, 6, 2 + rank])
        without, with_banks = found["net"]
        for key, value in with_banks.items():
            if ranks_per_node == 1 or "running" not in key:  # of the last step, as with DDP
                assert torch.equal(value, ranks[0]["net"][1][key]), key
            assert without[key].shape == value.shape


class FixedBanks(Banks):
    """Its banks do not grow, because averages of weights need buffers of the same length."""

    training_step = Plain.training_step


def _saved_with_averages(folder: Path) -> list[Any]:
    module = FixedBanks()
    strategy = HierarchicalStrategy(PeriodicAveraging(2), ranks_per_node=1, average_buffers=LEFT_OUT)
    saves = ModelCheckpoint(folder, save_last=True)
    more = {"callbacks": [saves, EMAWeightAveraging(decay=0.5)], "enable_checkpointing": True, "val_check_interval": 2}
    one_trainer(folder, devices=2, strategy=strategy, **more).fit(module)
    saved = torch.load(saves.last_model_path, weights_only=True)["state_dict"]
    return [module.bank.tolist(), saved["bank"].tolist(), saved["net.0.weight"].tolist()]


def test_averages_of_weights_are_saved_without_buffers_that_are_left_out(borrow):
    (one, saved, weight), (other, _, same_weight) = borrow(_saved_with_averages, 2)
    assert one == saved == [10.0] * 2
    assert other == [11.0] * 3
    assert weight == same_weight


class Unequal(Plain):
    """A rank has another head or bank, or freezes its head."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        differs = self.trainer.global_rank == 1
        self.register_buffer("bank", torch.zeros(2 + (self.how == "buffer" and differs)))
        if self.how != "missing" or not differs:
            self.head = nn.Linear(1, 2 + (self.how == "shape" and differs))
            self.head.requires_grad_(self.how != "frozen" or not differs)


@pytest.mark.parametrize(
    ("how", "ranks_per_node", "difference"),
    [
        ("buffer", 2, r"buffer bank: float32\[2\] on rank 0, float32\[3\] on rank 1"),
        ("shape", 1, r"parameter head.weight: float32\[2, 1\] on rank 0, float32\[3, 1\] on rank 1"),
        ("frozen", 2, "parameter head.weight: trained on rank 0, frozen on rank 1"),
        ("missing", 1, r"parameter head.weight: float32\[2, 1\] on cpu on rank 0, missing on rank 1"),
    ],
)
def test_tensors_that_differ_are_refused_before_training(fit, how, ranks_per_node, difference):
    with pytest.raises(ProcessException, match=f"ValueError: {difference}"):
        fit(Unequal(how), {"scheme": AllReduce(), "ranks_per_node": ranks_per_node}, devices=2)


def _refused(module: nn.Module, topology: Topology, average_buffers: Any = True) -> str:
    with pytest.raises(ValueError, match="rank 0") as refused:
        own_tensors(module, topology.world, torch.device("cpu"), average_buffers)
    return str(refused.value)


def test_every_rank_refuses_tensors_that_differ():
    def work(topology: Topology) -> list[Any]:
        layer, other = nn.Linear(1, 1 + topology.rank), nn.Module()
        other.register_buffer("bank", torch.zeros(1 + topology.rank))
        other.register_buffer("types", torch.zeros(1, dtype=[torch.float32, torch.float64][topology.rank // 2]))
        said = [_refused(layer, topology), _refused(other, topology), _refused(other, topology, ["types"])]
        return [*said, own_tensors(other, topology.world, torch.device("cpu"), ["b"])]

    said = on_ranks(work, [[0], [1], [2]])
    assert said == [said[0]] * 3
    parameter, bank, types, own = said[0]
    assert parameter.startswith("parameter weight: float32[1, 1] on rank 0, float32[2, 1] on rank 1")
    assert bank.startswith("buffer bank: float32[1] on rank 0, float32[2] on rank 1")
    assert "average_buffers=[...]" in bank
    assert types.startswith("buffer types: float32[1] on rank 0, float64[1] on rank 2")
    assert own == {"bank", "types"}


def _trained_on_fabric(ranks_per_node: int, folder: Path) -> list[Any]:
    strategy = HierarchicalFabricStrategy("periodic", ranks_per_node=ranks_per_node, average_buffers=LEFT_OUT)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    rank = fabric.global_rank
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module.register_buffer("bank", torch.zeros(2 + rank))
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in strategy.epochs(2):
        for _ in range(3):
            module.bank = torch.full((len(module.bank) + 1,), float(rank))
            fabric.backward(model(torch.full((2, 4), rank + 1.0) + torch.eye(2, 4)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        with strategy.averaged_model():
            held = module.bank.tolist()
    fabric.save(folder / "saved.ckpt", {"model": module})
    saved = torch.load(folder / "saved.ckpt", weights_only=True)["model"]
    return [held, module.bank.tolist(), saved["bank"].tolist(), [p.tolist() for p in module.parameters()]]


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_buffers_that_are_left_out_stay_each_ranks_own_on_fabric(borrow, ranks_per_node):
    ranks = borrow(partial(_trained_on_fabric, ranks_per_node), 2)
    for rank, (held, bank, saved, parameters) in enumerate(ranks):
        assert held == bank == [float(rank)] * (8 + rank)
        assert saved == [0.0] * 8
        assert parameters == ranks[0][3]
