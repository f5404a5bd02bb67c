"""Parameters and buffers that a module tells DDP to ignore stay each rank's own, as on DDP."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import whole_and_resumed
from lightning.pytorch.strategies import DDPStrategy
from problems import on_fabric, one_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hiercomm import (
    AllReduce,
    Gossip,
    HierarchicalModelParallelStrategy,
    HierarchicalStrategy,
    PeriodicAveraging,
    StepsDelay,
)
from lightning_hiercomm.trainer.elastic_refusals import check_trainer

pytestmark = pytest.mark.pooled
SCHEMES = {"all_reduce": AllReduce(), "periodic": PeriodicAveraging(2), "gossip": Gossip()}
OWN = ("layers.expert", "layers.table", "layers.seen")


class Layers(nn.Module):
    """A parameter that all ranks share, and one of each rank with the buffers that belong to it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.zeros(3))
        self.expert = nn.Parameter(torch.zeros(4))
        self.register_buffer("table", torch.zeros(4).to_sparse())
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, rank: int) -> Tensor:
        return (self.expert - 2.0 * rank - 3.0).square().sum() + (self.shared - rank).square().sum()


class Experts(pl.LightningModule):
    """Rank r begins with an expert of r, and moves it towards its own target; the buffers count what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()
        self._ddp_params_and_buffers_to_ignore = [*OWN, "layers.nothing"]
        self.layers._ddp_params_and_buffers_to_ignore = [name.removeprefix("layers.") for name in OWN]  # for Fabric
        self.report: list[Any] = []

    def setup(self, stage: str) -> None:
        self.begin(self.global_rank)

    def begin(self, rank: int) -> None:
        with torch.no_grad():
            self.layers.shared.fill_(1.0 + rank)
            self.layers.expert.fill_(float(rank))
            self.layers.table = (torch.arange(4.0) * rank).to_sparse()
            self.layers.seen.fill_(10.0 * rank)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.layers.seen += 1.0
        return self.layers(self.global_rank)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.report.append(own_of(self))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(16.0), batch_size=4 // self.trainer.world_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(self.trainer.world_size))


class Sharded(Experts):
    def configure_model(self) -> None:
        """Shard nothing: the strategy insists on the hook."""


def own_of(module: pl.LightningModule) -> list[list[float]]:
    return [getattr(module.layers, name).detach().to_dense().tolist() for name in ("expert", "table", "seen")]


def trained(folder: Any, strategy: Any, ranks: int, kind: type[Experts] = Experts) -> tuple[Any, ...]:
    module = kind()
    one_trainer(folder, devices=ranks, strategy=strategy).fit(module)
    return own_of(module), module.report, module.layers.shared.tolist()


@pytest.mark.parametrize("ranks_per_node", [1, 2], ids=["2x1", "2x2"])
def test_what_ddp_ignores_stays_each_ranks_own(borrow, ranks_per_node):
    ranks = 2 * ranks_per_node

    def all_of(folder):
        ours = {n: HierarchicalStrategy(scheme, ranks_per_node=ranks_per_node) for n, scheme in SCHEMES.items()}
        return {name: trained(folder, each, ranks) for name, each in {"ddp": DDPStrategy(), **ours}.items()}

    of_ranks = borrow(all_of, ranks=ranks)
    for rank, found in enumerate(of_ranks):
        own, validated, shared = found.pop("ddp")
        assert own[2] == [10.0 * rank + 2 * (16 // 4)] * 2
        for name, ours in found.items():
            assert ours[:2] == (own, validated), name
            assert ours[2] == of_ranks[0][name][2], name
        assert found["all_reduce"][2] == pytest.approx(shared)


def test_sidecars_restore_what_ddp_ignores_on_each_rank(borrow):
    def both(folder):
        found = []
        for name in ("all_reduce", "periodic"):
            modules = whole_and_resumed(folder, Experts, SCHEMES[name], after=3)
            found.append([(own_of(each), each.report, each.layers.shared.tolist()) for each in modules])
            saved = torch.load(folder / "whole.ckpt", weights_only=False)["state_dict"]["layers.seen"]
            assert saved.tolist() == [3.0] * 2, "a checkpoint holds rank 0's, as on DDP"
        return found

    for found in borrow(both, ranks=2):
        for whole, resumed in found:
            assert resumed[0] == whole[0]
            assert resumed[1] == whole[1][-len(resumed[1]) :]
            assert resumed[2] == whole[2]


def test_loops_on_fabric_leave_each_rank_its_own(borrow):
    def loop(fabric):
        module = Experts()
        module.begin(fabric.global_rank)
        model, optimizer = fabric.setup(module.layers, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in range(3):
            fabric.backward(model(fabric.global_rank))
            optimizer.step()
            optimizer.zero_grad()
        return own_of(module)

    (zero, zeros), (one, ones) = borrow(lambda _: on_fabric(loop), ranks=2)
    assert (zeros, ones) == (zero, one)
    assert zero[1:] != one[1:]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (lambda: HierarchicalStrategy(StepsDelay(2, 2), ranks_per_node=1), "StepsDelay steps all parameters"),
        (lambda: HierarchicalModelParallelStrategy(), "does not use DDP, and makes all nodes equal: leave the attr"),
    ],
    ids=["steps_delay", "fsdp2"],
)
def test_what_cannot_leave_a_rank_its_own_is_refused(borrow, strategy, message):
    def fails(folder):
        with pytest.raises(ValueError, match=message):
            trained(folder, strategy(), 2, kind=Sharded)

    borrow(fails, ranks=2)


def test_elastic_nodes_refuse_what_a_joining_node_would_lose():
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(Experts())
    with pytest.raises(ValueError, match=r"elastic nodes: the module tells DDP .* a joining node begins with another"):
        check_trainer(trainer)
