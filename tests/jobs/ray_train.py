"""Train under Ray or torchrun: `python ray_train.py --out FOLDER [--kill]` is the driver on a local Ray of two nodes.

Under torchrun, with `--torchrun`, each process is a rank.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiercomm import HierarchicalStrategy, PeriodicAveraging

EPOCHS, BATCHES, BATCH, RANKS = 3, 6, 4, 4


def wait_for_checkpoint(snapshot: Path) -> None:
    """Wait until Ray's controller, which polls its workers, knows of a checkpoint."""
    deadline = time.monotonic() + 60
    while not (snapshot.exists() and '"checkpoint_dir_name"' in snapshot.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ray wrote no checkpoint to {snapshot}")
        time.sleep(0.1)


class Net(pl.LightningModule):
    def __init__(self, victim: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.victim = victim

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        is_moment = self.victim is not None and (self.current_epoch, batch_idx, self.global_rank) == (1, 2, 3)
        if is_moment and not self.victim.exists():
            self.victim.touch()
            wait_for_checkpoint(self.victim.with_name("killed") / "checkpoint_manager_snapshot.json")
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        torch.manual_seed(3)
        data = TensorDataset(torch.randn(BATCHES * BATCH * RANKS, 8), torch.randn(BATCHES * BATCH * RANKS, 1))
        return DataLoader(data, batch_size=BATCH, shuffle=True)


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


def fit(strategy: pl.strategies.Strategy, path: Path, victim: Path | None = None, **arguments: Any) -> None:
    torch.set_num_threads(1)
    checkpoint = arguments.pop("ckpt_path", None)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Report(path), *arguments.pop("callbacks", [])],
        **arguments,
    )
    if "plugins" in arguments:
        from ray.train.lightning import prepare_trainer

        trainer = prepare_trainer(trainer)
    trainer.fit(Net(victim), ckpt_path=checkpoint)


def train(config: dict[str, Any]) -> None:
    """Ray's training function, on every worker."""
    import ray.train
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback

    from lightning_hiercomm.trainer.ray import RayHierarchicalStrategy

    given = ray.train.get_checkpoint()
    settings: dict[str, Any] = {"plugins": [RayLightningEnvironment()], "callbacks": [RayTrainReportCallback()]}
    victim = Path(config["victim"]) if config["victim"] else None
    strategy = RayHierarchicalStrategy(PeriodicAveraging(4))
    if given is None:
        fit(strategy, Path(config["path"]), victim, devices="auto", **settings)
        return
    with given.as_directory() as folder:
        fit(strategy, Path(config["path"]), victim, devices="auto", ckpt_path=f"{folder}/checkpoint.ckpt", **settings)


def drive(out: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    size = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    cluster.add_node(**size)
    ray.init(address=cluster.address)
    try:
        for name, victim in (("ray", ""), ("killed", str(out / "victim"))):
            run = RunConfig(name=name, storage_path=str(out), failure_config=FailureConfig(max_failures=1))
            scaling = ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1})
            config = {"path": str(out / f"{name}.pt"), "victim": victim}
            TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--torchrun", action="store_true")
    arguments = parser.parse_args()
    if arguments.torchrun:
        fit(HierarchicalStrategy(PeriodicAveraging(4)), arguments.out / "torchrun.pt", devices=2, num_nodes=2)
    else:
        drive(arguments.out)


if __name__ == "__main__":
    main()
