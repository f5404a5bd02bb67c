"""A job for tests that start real processes: the oracle problem, with accidents that happen to one rank."""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1] / "support"))
from zoo import ZOO

from lightning_hiercomm import Health, HierarchicalStrategy, PeriodicAveraging, Transport

TARGETS = (0.0, 2.0, 4.0, 10.0)


def _raise(error: BaseException) -> None:
    raise error


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).pause()  # keeps the interpreter's lock


FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "raise": lambda: _raise(ValueError("the dog ate the batch")),
    "out of memory": lambda: _raise(MemoryError("on purpose")),
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit(0)": lambda: os._exit(0),
    "Ctrl-C": lambda: os.kill(os.getpid(), signal.SIGINT),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hold": hold_the_interpreter,
}
"""What ends a run, or stops its victim."""
ACCIDENTS: dict[str, Callable[[argparse.Namespace], object]] = {
    **{name: lambda _, fault=fault: fault() for name, fault in FAULTS.items()},
    "sleep": lambda arguments: time.sleep(arguments.hang_timeout * 2),
}
ELSEWHERE = ("leave",)
"""Accidents at a moment of their own: before the trainer knows its rank."""
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


class Oracle(pl.LightningModule):
    """An accident happens to one rank when it comes to a moment for so many times."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1))
        self.arguments, self.left = arguments, arguments.at
        self.trace: list[float] = []
        self.samples: list[float] = []

    def reach(self, moment: str) -> None:
        arguments = self.arguments
        if (moment, self.global_rank) != (arguments.moment, arguments.victim) or arguments.accident in ELSEWHERE:
            return
        self.left -= 1
        if self.left < 0:
            self.left = 10**6  # handlers of the accident may come to the moment again
            (arguments.out / "accident").write_text(str(time.time()))
            ACCIDENTS[arguments.accident](arguments)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.samples += batch.flatten().tolist()
        self.seen.lerp_(batch, 0.5)
        arguments = self.arguments
        if self.global_rank == arguments.slow_rank:
            time.sleep(arguments.slow_seconds)
        if self.global_rank == arguments.last_rank:
            self.let_the_others_go_first(batch_idx)
        elif arguments.last_rank >= 0:
            (arguments.out / f"began-{batch_idx}").touch()
        self.reach("training_step")
        return (0.5 * (self.x - TARGETS[self.global_rank]) ** 2).sum()

    def let_the_others_go_first(self, step: int) -> None:
        period = self.arguments.sync_every
        last, deadline = step - step % period + period - 1, time.monotonic() + 60
        while not (self.arguments.out / f"began-{last}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"they wait for this rank's step {step} before their step {last}")
            time.sleep(0.01)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.reach("validation_step")
        self.log("val_loss", self.x.sum(), sync_dist=True)

    def configure_callbacks(self) -> list[pl.Callback]:
        if self.arguments.accident == "leave" and os.environ.get("LOCAL_RANK") == str(self.arguments.victim):
            sys.exit(0)
        return []

    def on_train_batch_end(self, *_: object) -> None:
        self.trace.append(self.x.item())
        self.reach("on_train_batch_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> DataLoader:
        samples = torch.arange(float(self.arguments.steps * self.trainer.world_size))
        return DataLoader(samples, num_workers=self.arguments.workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.zeros(self.trainer.world_size))


for _moment in {*MOMENTS} - {*vars(Oracle)}:
    setattr(Oracle, _moment, lambda self, *_, moment=_moment, **__: self.reach(moment))


class Report(pl.Callback):
    """Writes what a rank saw, however it ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        report = {
            "nodes": trainer.strategy.topology.nodes,
            "samples": pl_module.samples,
            "trace": pl_module.trace,
            "x": pl_module.x.item(),
        }
        unfinished = self.folder / f"unfinished-{trainer.global_rank}.json"
        unfinished.write_text(json.dumps(report))
        unfinished.rename(self.folder / f"rank-{trainer.global_rank}.json")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.strategy.topology is not None:  # not in the parent that forked
            self.on_fit_end(trainer, pl_module)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scheme", choices=ZOO, help="default: PeriodicAveraging(sync_every)")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--ranks-per-node", type=int)
    parser.add_argument("--start-method", default="popen")
    parser.add_argument("--inter-node", default="torch")
    parser.add_argument("--python", default=sys.executable, help="what Lightning is to start ranks with")
    parser.add_argument("--hang-timeout", type=float, default=300.0)
    parser.add_argument("--host-name", help="what this machine says it is called")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--sync-every", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="of each rank's loader")
    parser.add_argument("--saves", action="store_true", help="after every epoch, which is validated")
    parser.add_argument("--replicas", action="store_true", help="save with sidecars")
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-seconds", type=float, default=0.0)
    parser.add_argument(
        "--last-rank", type=int, default=-1, help="takes each step when others have begun the last one of its period"
    )
    parser.add_argument("--victim", type=int, default=-1)
    parser.add_argument("--moment", choices=MOMENTS, default="training_step")
    parser.add_argument("--at", type=int, default=0, help="for how many times it comes there unharmed")
    parser.add_argument("--accident", choices=[*ACCIDENTS, *ELSEWHERE])
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    sys.executable = arguments.python
    multiprocessing.set_executable(arguments.python)
    if arguments.host_name:
        socket.gethostname = lambda: arguments.host_name
    out = arguments.out
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
        strategy=HierarchicalStrategy(
            ZOO.get(arguments.scheme, PeriodicAveraging(arguments.sync_every)),
            ranks_per_node=arguments.ranks_per_node,
            transport=Transport(inter_node=arguments.inter_node),
            health=Health(hang_timeout=arguments.hang_timeout),
            start_method=arguments.start_method,
            checkpoint_replicas=arguments.replicas,
        ),
        max_epochs=arguments.epochs,
        callbacks=[ModelCheckpoint(out / "checkpoints", save_top_k=-1)]
        if arguments.saves
        else [Report(out), OnExceptionCheckpoint(out, filename="stopped")],
        default_root_dir=out,
        limit_val_batches=int(arguments.saves),
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Oracle(arguments))


if __name__ == "__main__":
    main()
