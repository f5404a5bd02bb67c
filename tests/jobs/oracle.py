"""A job for tests that start real processes: the oracle problem, with things that happen to one rank."""

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
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader

from lightning_hiercomm import Health, HierarchicalStrategy, PeriodicAveraging, Transport

TARGETS = (0.0, 2.0, 4.0, 10.0)


class Oracle(pl.LightningModule):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(1))
        self.arguments = arguments
        self.trace: list[float] = []
        self.samples: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.samples += batch.flatten().tolist()
        arguments = self.arguments
        if self.global_rank == arguments.slow_rank:
            time.sleep(arguments.slow_seconds)
        if self.global_rank == arguments.last_rank:
            self.let_the_others_go_first(batch_idx)
        elif arguments.last_rank >= 0:
            (arguments.out / f"began-{batch_idx}").touch()
        if self.global_rank == arguments.victim and batch_idx == arguments.at:
            (arguments.out / "accident").write_text(str(time.time()))
            if arguments.accident == "raise":
                raise ValueError("the dog ate the batch")
            if arguments.accident == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if arguments.accident == "term":
                os.kill(os.getpid(), signal.SIGTERM)
            if arguments.accident == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if arguments.accident == "hold":
                ctypes.PyDLL(None).pause()  # which keeps the interpreter's lock
            if arguments.accident == "disk":
                wait_as_for_a_disk(arguments.out / "fifo")
            if arguments.accident == "sleep":
                time.sleep(arguments.hang_timeout * 2)
        return (0.5 * (self.x - TARGETS[self.global_rank]) ** 2).sum()

    def let_the_others_go_first(self, step: int) -> None:
        period = self.arguments.sync_every
        last, deadline = step - step % period + period - 1, time.monotonic() + 60
        while not (self.arguments.out / f"began-{last}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"they wait for this rank's step {step} before their step {last}")
            time.sleep(0.01)

    def configure_callbacks(self) -> list[pl.Callback]:
        if self.arguments.accident == "leave" and os.environ.get("LOCAL_RANK") == str(self.arguments.victim):
            sys.exit(0)
        return []

    def on_train_batch_end(self, *_: object) -> None:
        self.trace.append(self.x.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> DataLoader:
        samples = torch.arange(float(self.arguments.steps * self.trainer.world_size))
        if self.arguments.accident == "worker" and self.global_rank == self.arguments.victim:
            return DataLoader(samples, num_workers=2, worker_init_fn=self.stop_worker)
        return DataLoader(samples)

    def stop_worker(self, worker: int) -> None:
        (self.arguments.out / f"worker-{worker}").write_text(str(os.getpid()))
        (self.arguments.out / "accident").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGSTOP)


def wait_as_for_a_disk(fifo: Path) -> None:
    """Be stuck in the kernel as in a hung file system: until a child, here one that waits for a pipe, has executed."""
    os.mkfifo(fifo)
    libc = ctypes.CDLL(None)
    actions, pid, nothing = ctypes.create_string_buffer(1024), ctypes.c_int(), (ctypes.c_char_p * 1)(None)
    libc.posix_spawn_file_actions_init(actions)
    libc.posix_spawn_file_actions_addopen(actions, 0, str(fifo).encode(), os.O_RDONLY, 0)
    libc.posix_spawn(ctypes.byref(pid), b"/bin/true", actions, None, nothing, nothing)


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
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-seconds", type=float, default=0.0)
    parser.add_argument(
        "--last-rank", type=int, default=-1, help="takes each step when others have begun the last one of its period"
    )
    parser.add_argument("--victim", type=int, default=-1)
    parser.add_argument("--at", type=int, default=-1)
    parser.add_argument(
        "--accident", choices=["raise", "kill", "term", "leave", "stop", "hold", "disk", "sleep", "worker"]
    )
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    sys.executable = arguments.python
    multiprocessing.set_executable(arguments.python)
    if arguments.host_name:
        socket.gethostname = lambda: arguments.host_name
    model = Oracle(arguments)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        num_nodes=arguments.num_nodes,
        strategy=HierarchicalStrategy(
            PeriodicAveraging(arguments.sync_every),
            ranks_per_node=arguments.ranks_per_node,
            transport=Transport(inter_node=arguments.inter_node),
            health=Health(hang_timeout=arguments.hang_timeout),
            start_method=arguments.start_method,
        ),
        max_epochs=arguments.epochs,
        callbacks=[Report(arguments.out), OnExceptionCheckpoint(arguments.out, filename="stopped")],
        default_root_dir=arguments.out,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)


if __name__ == "__main__":
    main()
