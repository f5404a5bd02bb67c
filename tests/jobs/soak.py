"""Many fits, or many steps, in one process, and what they leave behind; under torchrun.

``python soak.py --out FOLDER --fits N``, or ``--steps N`` for so many steps of each asynchronous scheme.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1] / "support"))
from zoo import ZOO

from lightning_hiercomm import HierarchicalStrategy, Scheme

torch.set_num_threads(1)

ASYNCHRONOUS = {name: ZOO[name] for name in ("daso", "streaming", "steps_delay", "gossip, overlapped")}
SCHEMES = [ZOO["all_reduce"], ZOO["periodic"], *ASYNCHRONOUS.values()]

_libc = ctypes.CDLL(None)


def held() -> dict[str, int]:
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)  # what is free, but not given back, goes up and down
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "process groups": len(dist.distributed_c10d._world.pg_map),
    }


class Watch(pl.Callback):
    """Looks twenty times what the process holds."""

    def __init__(self, steps: int) -> None:
        self.every = max(1, steps // 20)
        self.seen: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step % self.every == 0:
            self.seen.append(held())


class Long(BoringModel):
    """An epoch has a thousand steps."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(RandomDataset(32, 1000 * self.trainer.world_size))


def fit(scheme: Scheme, ranks_per_node: int, module: pl.LightningModule, steps: int, *callbacks: pl.Callback) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=HierarchicalStrategy(scheme, ranks_per_node=ranks_per_node),
        max_epochs=-1,
        max_steps=steps,
        limit_val_batches=1,
        callbacks=[*callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fits", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    arguments = parser.parse_args()
    gc.freeze()  # what is imported stays, and every look would go through it
    fits: list[dict[str, int]] = []
    for number in range(arguments.fits):
        fit(SCHEMES[number % len(SCHEMES)], 1, BoringModel(), 4)
        fits.append(held())
    steps: dict[str, list[dict[str, int]]] = {}
    for name in ASYNCHRONOUS if arguments.steps else ():
        watch = Watch(arguments.steps)
        fit(ASYNCHRONOUS[name], 2, Long(), arguments.steps, watch)
        steps[name] = watch.seen
        if os.environ["RANK"] == "0":
            print(f"{name}, rank 0, {arguments.steps} steps: {watch.seen}", flush=True)
    (arguments.out / f"soak-{os.environ['RANK']}.json").write_text(json.dumps({"fits": fits, "steps": steps}))


if __name__ == "__main__":
    main()
