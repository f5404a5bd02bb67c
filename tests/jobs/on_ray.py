"""Train under Ray or torchrun: `python on_ray.py FOLDER RUN...` is the driver on a local Ray of two nodes.

Runs are ``ray``, ``killed``, in which a worker is killed in the second epoch, and ``elastic``: each worker is a node.
The last one dies once, and the others slow down until it is back. Under torchrun each process is a rank of the run
``torchrun``.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiercomm import Elastic, HierarchicalStrategy, PeriodicAveraging

RANKS = 4
LENGTH = {"max_epochs": 3, "limit_train_batches": 6}
ELASTIC = Elastic(min_nodes=1, dead_after=2.0)
STEPS, DIES_AT, SECONDS = 120, 21, 120.0


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)

    def train_dataloader(self) -> DataLoader:
        torch.manual_seed(3)
        return DataLoader(TensorDataset(torch.randn(512, 8), torch.randn(512, 1)), batch_size=4, shuffle=True)


class Report(pl.Callback):
    """Writes the averaged model and the nodes, and notes every epoch that begins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            with self.path.with_suffix(".epochs").open("a") as file:
                file.write(f"{trainer.current_epoch} ")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            nodes = [list(node) for node in trainer.strategy.topology.nodes]
            torch.save({"nodes": nodes, "state_dict": pl_module.state_dict()}, self.path)


class Dies(pl.Callback):
    """Kills rank 3 once in the second epoch, when Ray's controller, which polls its workers, knows of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.done, self.snapshot = folder / "died", folder / "killed" / "checkpoint_manager_snapshot.json"

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx, trainer.global_rank) != (1, 2, 3) or self.done.exists():
            return
        self.done.touch()
        deadline = time.monotonic() + 60
        while not (self.snapshot.exists() and '"checkpoint_dir_name"' in self.snapshot.read_text()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Ray wrote no checkpoint to {self.snapshot}")
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)


class Life(pl.Callback):
    """Writes down a life of a worker, in `RANK.LIFE.json`: when it took which step, and its parameters at the end."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.life = len(list(folder.glob(f"{rank}.*.json")))
        self.dies = self.life == 0 and rank == RANKS - 1
        self.notes: dict[str, Any] = {"steps": []}
        self.write()

    def write(self) -> None:
        path = self.folder / f"{self.rank}.{self.life}.json"
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(self.notes))
        temporary.replace(path)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        self.notes["steps"].append([time.time(), step])
        if self.dies and step == DIES_AT:
            self.notes["killed"] = time.time()
            self.write()
            os.kill(os.getpid(), signal.SIGKILL)
        again = self.folder / f"{RANKS - 1}.1.json"
        if step > DIES_AT and not again.with_suffix(".trains").exists():
            deadline = time.monotonic() + SECONDS
            while step == STEPS // 2 and not again.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (self.folder / f"{self.rank}.{self.life}.trains").touch()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        state = pl_module.state_dict()
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()
        self.notes.update(step=trainer.global_step, digest=digest)
        self.write()


def fit(strategy: Any, callbacks: list[pl.Callback], path: str | None = None, **arguments: Any) -> None:
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    if "plugins" in arguments:
        from ray.train.lightning import prepare_trainer

        trainer = prepare_trainer(trainer)
    trainer.fit(Net(), ckpt_path=path)


def train(config: dict[str, str]) -> None:
    """Ray's training function, on every worker."""
    import ray.train
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback

    from lightning_hiercomm.trainer.ray import RayHierarchicalStrategy

    folder, name = Path(config["folder"]), config["name"]
    on_ray: dict[str, Any] = {"devices": "auto", "plugins": [RayLightningEnvironment()]}
    if name == "elastic":
        life = Life(folder, ray.train.get_context().get_world_rank())
        fit(RayHierarchicalStrategy(PeriodicAveraging(4), elastic=ELASTIC), [life], max_steps=STEPS, **on_ray)
        return
    callbacks = [Report(folder / f"{name}.pt"), RayTrainReportCallback(), *[Dies(folder)] * (name == "killed")]
    given = ray.train.get_checkpoint()
    with given.as_directory() if given else nullcontext() as saved:
        path = f"{saved}/checkpoint.ckpt" if given else None
        fit(RayHierarchicalStrategy(PeriodicAveraging(4)), callbacks, path, **LENGTH, **on_ray)


def drive(folder: Path, names: list[str]) -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from lightning_hiercomm.trainer.ray_elastic import ElasticTorchConfig

    size = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    cluster.add_node(**size)
    ray.init(address=cluster.address)
    try:
        for name in names:
            TorchTrainer(
                train,
                train_loop_config={"folder": str(folder), "name": name},
                scaling_config=ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1}),
                torch_config=ElasticTorchConfig(ELASTIC) if name == "elastic" else None,
                run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=8)),
            ).fit()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    out, *runs = sys.argv[1:]
    if runs == ["torchrun"]:
        report = Report(Path(out) / "torchrun.pt")
        fit(HierarchicalStrategy(PeriodicAveraging(4)), [report], devices=2, num_nodes=2, **LENGTH)
    else:
        drive(Path(out).resolve(), runs)
