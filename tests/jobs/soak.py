"""Many fits in one process, and what each leaves behind: ``python soak.py --out FOLDER --fits N``, under torchrun."""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Gossip,
    HierarchicalStrategy,
    PeriodicAveraging,
    Scheme,
    StepsDelay,
)

torch.set_num_threads(1)

SCHEMES: list[Callable[[], Scheme]] = [
    AllReduce,
    lambda: PeriodicAveraging(2),
    lambda: DASO(2, 1, warmup_epochs=0, cooldown_epochs=0),
    lambda: DiLoCo(2, staleness=1),
    lambda: StepsDelay(2, warmup_steps=0),
    lambda: Gossip(overlap=True),
]


def held() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    return {
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "process groups": len(dist.distributed_c10d._world.pg_map),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fits", type=int, default=50)
    arguments = parser.parse_args()
    seen = []
    for fit in range(arguments.fits):
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy=HierarchicalStrategy(SCHEMES[fit % len(SCHEMES)](), ranks_per_node=1),
            max_steps=4,
            limit_val_batches=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(BoringModel())
        seen.append(held())
    (arguments.out / f"soak-{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
