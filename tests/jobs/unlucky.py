"""A run in which something happens to one rank, at some moment: the job of ``python -m tools.faults``."""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Gossip,
    Health,
    HierarchicalStrategy,
    PeriodicAveraging,
    Scheme,
    StepsDelay,
)

SCHEMES: dict[str, Callable[[], Scheme]] = {
    "all_reduce": AllReduce,
    "periodic": lambda: PeriodicAveraging(3),
    "daso": lambda: DASO(2, 1, warmup=0, cooldown=0),
    "diloco": lambda: DiLoCo(3, staleness=1),
    "steps_delay": lambda: StepsDelay(2, warmup_steps=2),
    "gossip": lambda: Gossip(overlap=True),
}

BATCHES, EPOCHS = 6, 3


def _raise(error: BaseException) -> None:
    raise error


FAULTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "raises": lambda: _raise(ValueError("the dog ate the batch")),
    "out of memory": lambda: _raise(MemoryError("on purpose")),
    "sys.exit(0)": lambda: _raise(SystemExit(0)),
    "os._exit(0)": lambda: os._exit(0),
    "Ctrl-C": lambda: os.kill(os.getpid(), signal.SIGINT),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "frozen": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "holds the GIL": lambda: ctypes.PyDLL(None).sleep(1000),
}
HANG_TIMEOUTS = {"frozen": 4.0, "holds the GIL": 4.0}

MOMENTS = (
    "configure_model",
    "on_fit_start",
    "training_step",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "validation_step",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_train_end",
)


class Unlucky(pl.LightningModule):
    """Something happens to one rank when it comes to a moment for so many times."""

    def __init__(self, folder: Path, fault: str, moment: str, victim: int, time: int, workers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
        self.folder, self.fault, self.moment, self.victim, self.left = folder, fault, moment, victim, time
        self.workers = workers

    def _reach(self, moment: str) -> None:
        if moment != self.moment or self.trainer.global_rank != self.victim:
            return
        self.left -= 1
        if self.left < 0:
            self.left = 10**6  # handlers of the fault may come to the moment again
            (self.folder / "struck").write_text(str(time.time()))
            FAULTS[self.fault]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._reach("training_step")
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._reach("validation_step")
        self.log("val_loss", self.layer(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader:
        data = torch.randn(2 * BATCHES * self.trainer.world_size, 8)
        return DataLoader(data, batch_size=2, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(2 * self.trainer.world_size, 8), batch_size=2)


def _hook(moment: str) -> Callable[..., None]:
    return lambda self, *_, **__: self._reach(moment)


for _moment in MOMENTS:
    if _moment not in vars(Unlucky):
        setattr(Unlucky, _moment, _hook(_moment))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scheme", choices=SCHEMES, required=True)
    parser.add_argument("--fault", choices=FAULTS, required=True)
    parser.add_argument("--moment", choices=MOMENTS, required=True)
    parser.add_argument("--victim", type=int, required=True)
    parser.add_argument("--time", type=int, default=0)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--ranks-per-node", type=int)
    parser.add_argument("--start-method", default="popen")
    parser.add_argument("--python", default=sys.executable, help="what to start ranks with")
    parser.add_argument("--workers", type=int, default=0, help="of each rank's loader")
    parser.add_argument("--replicas", action="store_true")
    arguments = parser.parse_args()
    sys.executable = arguments.python
    multiprocessing.set_executable(arguments.python)
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
        strategy=HierarchicalStrategy(
            SCHEMES[arguments.scheme](),
            ranks_per_node=arguments.ranks_per_node,
            start_method=arguments.start_method,
            checkpoint_replicas=arguments.replicas,
            health=Health(hang_timeout=HANG_TIMEOUTS.get(arguments.fault, 300.0)),
        ),
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(arguments.out / "checkpoints", save_top_k=-1)],
        default_root_dir=arguments.out,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    settings = (arguments.fault, arguments.moment, arguments.victim, arguments.time, arguments.workers)
    trainer.fit(Unlucky(arguments.out, *settings))


if __name__ == "__main__":
    main()
