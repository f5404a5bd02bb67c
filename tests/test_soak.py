"""What many fits, and many steps, in one process leave behind: nothing.

``SOAK_STEPS=20000`` in the environment makes the runs of many steps long ones.
"""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from fits import fit_here
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from ranks import Ranks
from torch.utils.data import DataLoader
from zoo import ZOO

STEPS = int(os.environ.get("SOAK_STEPS", "120"))
SECONDS = 240 + STEPS / 10
ASYNCHRONOUS = ("daso", "streaming", "steps_delay", "gossip, overlapped")
HANDLES = ("handles", "threads", "process groups")
LIBC = ctypes.CDLL(None)

pytestmark = pytest.mark.slow


def held() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)  # what is free, but not given back, goes up and down
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "process groups": len(dist.distributed_c10d._world.pg_map),
    }


def soak(ranks: int, program: Any, folder: Path) -> list[Any]:
    with closing(Ranks(SECONDS)) as world:
        return world.run(ranks, program, folder)


class Watch(pl.Callback):
    """Looks twenty times what the process holds."""

    def __init__(self) -> None:
        self.seen: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step % max(1, STEPS // 20) == 0:
            self.seen.append(held())


class Long(BoringModel):
    """An epoch has a thousand steps."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(RandomDataset(32, 1000 * self.trainer.world_size))


def many_fits(folder: Path) -> list[dict[str, int]]:
    seen, names = [], ("all_reduce", "periodic", *ASYNCHRONOUS)
    for number in range(17):
        fit_here(folder, BoringModel(), ZOO[names[number % len(names)]], max_steps=4, limit_val_batches=1)
        seen.append(held())
    return seen


def many_steps(folder: Path) -> dict[str, list[dict[str, int]]]:
    found = {}
    for name in ASYNCHRONOUS:
        watch, length = Watch(), {"max_epochs": -1, "max_steps": STEPS, "limit_val_batches": 1}
        fit_here(folder, Long(), ZOO[name], devices=4, ranks_per_node=2, callbacks=[watch], **length)
        found[name] = watch.seen
    return found


@pytest.mark.long("at least 17 fits, one after the other, in one process")
def test_many_fits_leak_no_handle_thread_or_process_group(tmp_path):
    for seen in soak(2, many_fits, tmp_path):
        after_every_scheme = seen[11]
        for name in HANDLES:  # a thread may need a moment to end
            assert min(look[name] for look in seen[-5:]) <= after_every_scheme[name], name


@pytest.mark.nightly
@pytest.mark.long("120 steps of each of four schemes on four ranks")
@pytest.mark.timeout(SECONDS + 60)
def test_steps_of_asynchronous_schemes_add_no_memory_handle_or_thread(tmp_path):
    for rank, found in enumerate(soak(4, many_steps, tmp_path)):
        for scheme, seen in found.items():
            middle, end = seen[len(seen) // 2], seen[-1]
            grown = end["memory"] - middle["memory"]
            print(f"rank {rank}, {scheme}: {grown} KiB in the last {STEPS // 2} steps, {end}")
            assert len(seen) == 20
            for name in HANDLES:  # a handle may be open for a moment
                assert min(look[name] for look in seen[-5:]) <= max(look[name] for look in seen[5:10]), (scheme, name)
            assert grown < 2048, (scheme, [look["memory"] for look in seen])
