"""Memory per scheme beyond DDP: ``python -m benchmarks.memory``; beyond FSDP2 on one node, with ``--sharded``.

Each scheme trains a model of 64 MiB on 2 nodes of 2 CPU ranks; rank 0's peak resident memory in the steps after the
first ones, and in a validation and checkpoint between two agreements, is compared with that of DDP, or with that of
``ModelParallelStrategy`` on one node of 2 ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_hiercomm import HierarchicalModelParallelStrategy, HierarchicalStrategy
from lightning_hiercomm.schemes import SCHEMES

LAYERS, WIDTH = 16, 1024
MODEL_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
STEPS = 21
ASYNCHRONOUS: dict[str, dict[str, Any]] = {  # short runs without warm-up, so that exchanges are in flight
    "periodic": {"sync_every": 4},
    "daso": {"warmup_epochs": 0, "cooldown_epochs": 0},
    "steps_delay": {"warmup_steps": 0},
    "diloco": {"sync_every": 4},
}
SHARDED: dict[str, dict[str, Any]] = {"daso": {"exchange": "sharded"}}
BASELINES = {False: "ddp", True: "model_parallel"}
CASES: dict[str, dict[str, Any]] = {name: ASYNCHRONOUS.get(name, {}) for name in SCHEMES}


class Model(pl.LightningModule):
    """Layers of 4 MiB; validates and writes a checkpoint in the middle of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.peaks: dict[str, int] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layers(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(STEPS * 4, WIDTH))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(4, WIDTH))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 8:
            reset_peak()
        if batch_idx == 18:  # the validation follows this one
            self.peaks["training"] = peak()
            reset_peak()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 19:
            self.peaks["validation and checkpoint"] = peak()

    def configure_model(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ModelParallelStrategy) and not isinstance(next(self.parameters()), DTensor):
            for layer in self.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def on_fit_end(self) -> None:
        if self.global_rank == 0:
            print(json.dumps(self.peaks), flush=True)


def reset_peak() -> None:
    """Forget the peak of resident memory (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Peak resident memory in bytes since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def train(case: str, sharded: bool) -> None:
    torch.set_num_threads(1)
    if not sharded:
        if case == BASELINES[False]:
            return fit(DDPStrategy(start_method="fork"), 4)
        scheme = SCHEMES[case](**CASES[case])
        return fit(HierarchicalStrategy(scheme, ranks_per_node=2, start_method="fork"), 4)
    ranks = 2 if case == BASELINES[True] else 4
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_free_network_port()))
    torch.multiprocessing.start_processes(_train_sharded, args=(case, ranks), nprocs=ranks, start_method="fork")


def _train_sharded(rank: int, case: str, ranks: int) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    if case == BASELINES[True]:
        return fit(ModelParallelStrategy(ranks, 1), ranks)
    arguments = {**CASES[case], **SHARDED.get(case, {})}
    fit(HierarchicalModelParallelStrategy(SCHEMES[case](**arguments), ranks_per_node=2), ranks)


def fit(strategy: Any, devices: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pl.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy,
            max_epochs=1,
            val_check_interval=19,
            num_sanity_val_steps=0,
            callbacks=[ModelCheckpoint(folder)],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Model())


def measure(case: str, sharded: bool) -> dict[str, int]:
    """Peaks of a fresh process whose allocator gives every freed tensor back to the system at once."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-m", "benchmarks.memory", "--case", case, *["--sharded"] * sharded]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sharded", action="store_true", help="shard the model over the ranks of a node with FSDP2")
    parser.add_argument("--case", choices=[*BASELINES.values(), *CASES], help="train one and print its peaks")
    arguments = parser.parse_args()
    sharded: bool = arguments.sharded
    if arguments.case:
        return train(arguments.case, sharded)
    baseline = measure(BASELINES[sharded], sharded)
    whose = "ModelParallelStrategy's on one node" if sharded else "DDP's"
    print(f"Model: {MODEL_BYTES / 2**20:.0f} MiB. Peak resident memory of a rank beyond {whose}, in models:\n")
    print("| scheme | " + " | ".join(baseline) + " |\n|---|" + "--:|" * len(baseline))
    for name in CASES:
        if sharded and name == "steps_delay":
            continue
        peaks = measure(name, sharded)
        beyond = {when: (peaks[when] - base, peaks[when] / base - 1) for when, base in baseline.items()}
        extra = [f"{extra / MODEL_BYTES:+.2f} ({share:+.1%})" for extra, share in beyond.values()]
        print(f"| `{name}` | " + " | ".join(extra) + " |", flush=True)


if __name__ == "__main__":
    main()
