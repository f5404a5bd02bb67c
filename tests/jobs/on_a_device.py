"""Fits of two ranks, each a node of its own, that share a GPU or the CPU: ``python -m jobs.on_a_device cpu FILE RANK``.

Every rank writes what :func:`fits` returns to ``FILE.RANK``, and checkpoints next to it;
``tests/gpu/test_trainer_on_a_gpu.py`` compares them.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).parents[1] / "support"))
from problems import QUIET, SaveAfter
from zoo import ZOO

from lightning_hiercomm import (
    HeterogeneousBatches,
    HierarchicalFabricStrategy,
    HierarchicalModelParallelStrategy,
    HierarchicalStrategy,
    Transport,
)
from lightning_hiercomm.batches import speed

BATCH, STEPS = 8, 12
"""Samples of a rank's step, and steps of a fit."""

SCHEMES = {name: ZOO[name] for name in ("all_reduce", "periodic", "daso", "gossip", "steps_delay")}
SCHEMES["diloco"] = ZOO["streaming"]
BETWEEN_NODES: dict[str, Any] = {"torch": {}, "gloo": {"transport": Transport(inter_node="gloo")}}


class Net(pl.LightningModule):
    """A small network with a buffer; its ``report`` is what the scaler says after each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        self.report: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])  # of the averaged model, in inference mode

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(BATCH, 6)), batch_size=BATCH)

    def on_train_batch_end(self, *_: object) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.report.append(scaler.get_scale())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(2 * STEPS * BATCH, 6, generator=generator)
        return DataLoader(TensorDataset(x, torch.randint(3, (len(x),), generator=generator)), batch_size=BATCH)


class Sharded(Net):
    def configure_model(self) -> None:
        if len(self.net) == 4:  # type: ignore[arg-type]
            self.net = nn.Sequential(self.net[0], self.net[2], self.net[3])  # type: ignore[index]
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Overflowing(Net):
    """Node 1's gradients overflow once, so that its scaler, and no other, skips a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if self.global_rank == 1 and batch_idx == 1 else loss


class Dropping(Net):
    """Draws random numbers where it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.Dropout(0.2))  # type: ignore[operator]

    def on_fit_start(self) -> None:
        torch.manual_seed(self.global_rank)


class Sizes(Net):
    """Reports the sizes of its batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.report.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


def fit(
    module: pl.LightningModule, strategy: Any, accelerator: str, path: Path | None = None, **arguments: Any
) -> dict[str, Any]:
    """Weights on the CPU, the report, and where the weights lay; resumed from a path if there is one."""
    own = {**QUIET, "accelerator": accelerator, "devices": 1, "num_nodes": 2, "strategy": strategy, "max_epochs": 1}
    trainer = pl.Trainer(**{**own, **arguments})
    devices: set[str] = set()

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
            devices.update(tensor.device.type for tensor in pl_module.state_dict().values())

    trainer.callbacks.append(Looks())
    trainer.fit(module, ckpt_path=path)
    state = {name: whole(tensor).cpu() for name, tensor in module.state_dict().items()}
    return {"state": state, "report": getattr(module, "report", []), "devices": sorted(devices)}


def loop(strategy: HierarchicalFabricStrategy, accelerator: str) -> dict[str, Any]:
    """What :func:`fit` says, of a loop on Fabric."""
    fabric = Fabric(accelerator=accelerator, devices=1, num_nodes=2, strategy=strategy)
    fabric.launch()
    net = Net()
    loader = fabric.setup_dataloaders(net.train_dataloader())
    model, optimizer = fabric.setup(net.net, torch.optim.SGD(net.net.parameters(), lr=0.1, momentum=0.9))
    for _ in strategy.epochs(1, steps=len(loader)):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
    state = model.state_dict()
    devices = sorted({tensor.device.type for tensor in state.values()})
    return {"state": {name: tensor.cpu() for name, tensor in state.items()}, "report": [], "devices": devices}


def whole(tensor: Tensor) -> Tensor:
    """Of a shard on a node of one rank, all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def fits(accelerator: str, folder: Path) -> dict[str, dict[str, Any]]:
    """All of them, by name.

    Args:
        accelerator: ``"cpu"`` or ``"gpu"``.
        folder: For checkpoints; that of both ranks.
    """
    warnings.filterwarnings("ignore")
    speed._BLOCK_SECONDS = 0.0  # noqa: SLF001
    found = {}

    def over_gloo(scheme: Any, **arguments: Any) -> HierarchicalStrategy:
        # nccl refuses two ranks on one GPU
        return HierarchicalStrategy(scheme, ranks_per_node=1, process_group_backend="gloo", **arguments)

    for name, scheme in SCHEMES.items():
        for between, arguments in BETWEEN_NODES.items():
            found[f"{name}, {between}"] = fit(Net(), over_gloo(scheme, **arguments), accelerator)
        found[f"{name}, bf16-mixed"] = fit(Net(), over_gloo(scheme), accelerator, precision="bf16-mixed")
        device = "cuda" if accelerator == "gpu" else "cpu"
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=100)
        plugin = MixedPrecision("16-mixed", device, scaler)
        found[f"{name}, 16-mixed"] = fit(Overflowing(), over_gloo(scheme), accelerator, plugins=[plugin])
        path, kept = folder / f"{name}.ckpt", {"checkpoint_replicas": True}
        saves = [SaveAfter(STEPS, path)]
        whole = fit(Dropping(), over_gloo(scheme, **kept), accelerator, max_epochs=2, callbacks=saves)
        found[f"{name}, whole"] = whole
        found[f"{name}, resumed"] = fit(Dropping(), over_gloo(scheme, **kept), accelerator, path, max_epochs=2)
    for name in ("all_reduce", "periodic", "diloco"):
        sharded = HierarchicalModelParallelStrategy(SCHEMES[name], ranks_per_node=1, process_group_backend="gloo")
        found[f"{name}, FSDP2"] = fit(Sharded(), sharded, accelerator)
    for name in ("periodic", "daso"):
        on_fabric = HierarchicalFabricStrategy(SCHEMES[name], ranks_per_node=1, process_group_backend="gloo")
        found[f"{name}, Fabric"] = loop(on_fabric, accelerator)
    batches = HeterogeneousBatches(2 * BATCH)
    found["measured"] = fit(Sizes(), over_gloo("all_reduce", batches=batches), accelerator)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, path, rank = sys.argv[1:]
    torch.save(fits(where, Path(path).parent), f"{path}.{rank}")
