"""Seconds to an accuracy on digits of four nodes with speeds 4 : 2 : 1 : 1: equal steps against each node's own pace.

Each node is one rank with a quota of CPU time. Rank 0 times a run from its first epoch to the ends of its epochs, and
measures the accuracy of the averaged model on the test samples there. Seeds are paired, and the order alternates.

    python -m benchmarks.studies.own_pace --seeds 0 1 2 --store runs.json
    python -m benchmarks.studies.own_pace --seeds 3 4 5 --store runs.json  # reports all six
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.papers.paired import difference
from benchmarks.quota import CpuQuota
from lightning_hiercomm import EverySeconds, Health, HierarchicalStrategy, PeriodicAveraging

SHARES = (0.6, 0.3, 0.15, 0.15)
"""CPU seconds per second of the four nodes, with quotas."""

LASTING = (0.02, 0.04, 0.08, 0.08)
"""Seconds of their steps, with ``--slowed-by sleep``, where computers are shared with others."""

TRAIN = 1536


class Digits(pl.LightningModule):
    """A small network on the digits; ``curve`` has the seconds and the accuracy at the end of every epoch."""

    def __init__(self, seed: int, batch: int, lr: float, share: float = 1.0, lasting: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.batch, self.lr, self.share, self.lasting = batch, lr, share, lasting
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        self.train_data = TensorDataset(x[order[:TRAIN]], y[order[:TRAIN]])
        self.test_data = x[order[TRAIN:]], y[order[TRAIN:]]
        self.began = 0.0
        self.curve: list[tuple[float, float]] = []
        self.steps = 0

    def on_train_start(self) -> None:  # without the quota, which would lengthen the start of the processes
        self.quota = CpuQuota(self.share) if self.share < 1 else None

    def on_train_end(self) -> None:
        if self.quota is not None:
            self.quota.close()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.step_began = time.perf_counter()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        time.sleep(max(0.0, self.step_began + self.lasting - time.perf_counter()))

    def on_train_epoch_start(self) -> None:
        self.began = self.began or time.perf_counter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:  # every rank holds the averaged model
        seconds = time.perf_counter() - self.began
        images, labels = self.test_data
        self.curve.append((seconds, 100.0 * (self.net(images).argmax(1) == labels).float().mean().item()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_data, self.batch, shuffle=True)


def of_rank(rank: int, chosen: argparse.Namespace, folder: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_hiercomm").setLevel(logging.ERROR)
    runs = {"equal": PeriodicAveraging(chosen.sync_every), "own": PeriodicAveraging(EverySeconds(chosen.seconds))}
    flags = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    found: dict[str, dict[int, Any]] = {name: {} for name in runs}
    for seed in (None, *chosen.seeds):  # the first run imports what is imported late
        for name in runs if seed is None or seed % 2 else reversed(runs):
            os.environ["PL_GLOBAL_SEED"] = str(seed or 0)
            slowed = {} if seed is None else {"share": SHARES[rank]}
            if chosen.slowed_by == "sleep":
                slowed = {"lasting": LASTING[rank]}
            module = Digits(seed or 0, chosen.batch, chosen.lr, **slowed)
            strategy = HierarchicalStrategy(runs[name], ranks_per_node=1, health=Health(hang_timeout=60.0))
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=len(SHARES),
                strategy=strategy,
                max_epochs=chosen.epochs if seed is not None else 1,
                **flags,
            )
            trainer.fit(module)
            if seed is not None:
                found[name][seed] = {"curve": module.curve, "steps": module.steps}
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


def first(curve: list[tuple[float, float]], accuracy: float) -> float:
    """Return the seconds until an accuracy was first reached; those of the whole run if it was not."""
    return next((seconds for seconds, reached in curve if reached >= accuracy), curve[-1][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--store", type=Path, help="file with the runs of earlier calls, to which these are added")
    parser.add_argument("--slowed-by", choices=("quota", "sleep"), default="quota")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--sync-every", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=0.6)
    chosen = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(of_rank, (chosen, Path(folder)), len(SHARES), start_method="fork")
        ranks = [json.loads((Path(folder) / f"found-{rank}.json").read_text()) for rank in range(len(SHARES))]
    if chosen.store is not None:
        before = json.loads(chosen.store.read_text()) if chosen.store.exists() else [{} for _ in ranks]
        ranks = [
            {name: {**old.get(name, {}), **new[name]} for name in new} for old, new in zip(before, ranks, strict=True)
        ]
        chosen.store.write_text(json.dumps(ranks))
    report(chosen, ranks)


def report(chosen: argparse.Namespace, ranks: list[Any]) -> None:
    print(vars(chosen))
    equal, own = ({int(seed): run["curve"] for seed, run in ranks[0][name].items()} for name in ("equal", "own"))
    for name, curves in {"equal": equal, "own": own}.items():
        steps = [statistics.mean(run["steps"] for run in rank[name].values()) for rank in ranks]
        seconds, accuracy = (statistics.mean(curve[-1][part] for curve in curves.values()) for part in (0, 1))
        print(f"{name}: {seconds:.2f} s, accuracy at the end {accuracy:.2f} %, steps of the nodes {steps}")
    apart = difference(*({seed: curve[-1][1] for seed, curve in curves.items()} for curves in (own, equal)))
    print(f"accuracy, own pace minus equal steps: {apart.text(2)}")
    ends = {seed: curve[-1] for seed, curve in equal.items()}
    sooner = {seed: first(own[seed], accuracy) for seed, (_, accuracy) in ends.items()}
    none = dict.fromkeys(ends, 0.0)
    for what, ratios in {
        "times as fast, at equal samples": {seed: ends[seed][0] / own[seed][-1][0] for seed in ends},
        "times as soon at the accuracy, against the end of equal steps": {
            seed: ends[seed][0] / sooner[seed] for seed in ends
        },
        "times as soon at the accuracy, against its first epoch there": {
            seed: first(equal[seed], ends[seed][1]) / sooner[seed] for seed in ends
        },
    }.items():
        print(f"{what}: {difference(ratios, none).text(2)}")
    missed = sum(max(reached for _, reached in own[seed]) < accuracy for seed, (_, accuracy) in ends.items())
    print(f"seeds of {len(ends)} that never reached it: {missed}")


if __name__ == "__main__":
    main()
