"""Elastic nodes under Ray: `python ray_elastic.py --out FOLDER` trains four workers on a local Ray.

Each worker is a node. The last one dies once, and the others slow down until it is back. Each life writes
`RANK.LIFE.json`: when it took which step, and its parameters at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiercomm import Elastic, PeriodicAveraging

ELASTIC = Elastic(min_nodes=1, dead_after=2.0)
NODES, STEPS, DIES_AT = 4, 120, 21
SECONDS = 120.0


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)

    def train_dataloader(self) -> DataLoader:
        torch.manual_seed(3)
        return DataLoader(TensorDataset(torch.randn(512, 8), torch.randn(512, 1)), batch_size=4, shuffle=True)


class Life(pl.Callback):
    """Notes the steps of this life of a worker, and ends it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.life = len(list(folder.glob(f"{rank}.*.json")))
        self.dies = self.life == 0 and rank == NODES - 1
        self.notes: dict[str, Any] = {"began": time.time(), "pid": os.getpid(), "steps": []}
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
        again = self.folder / f"{NODES - 1}.1.json"
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
        self.notes.update(ended=time.time(), step=trainer.global_step, digest=digest)
        self.write()


def train(config: dict[str, Any]) -> None:
    """Run on every worker."""
    import ray.train
    from ray.train.lightning import RayLightningEnvironment, prepare_trainer

    from lightning_hiercomm.trainer.ray import RayHierarchicalStrategy

    torch.set_num_threads(1)
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=RayHierarchicalStrategy(PeriodicAveraging(4), elastic=ELASTIC),
        plugins=[RayLightningEnvironment()],
        callbacks=[Life(folder, rank)],
        enable_checkpointing=False,
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    prepare_trainer(trainer).fit(Net())


def drive(out: Path) -> None:
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
        TorchTrainer(
            train,
            train_loop_config={"folder": str(out)},
            scaling_config=ScalingConfig(num_workers=NODES, resources_per_worker={"CPU": 1}),
            torch_config=ElasticTorchConfig(ELASTIC),
            run_config=RunConfig(name="ray", storage_path=str(out), failure_config=FailureConfig(max_failures=8)),
        ).fit()
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    drive(parser.parse_args().out.resolve())


if __name__ == "__main__":
    main()
