"""One rank that is four times slower: equal batches against measured ones.

python -m benchmarks.studies.batches
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.quota import CpuQuota
from lightning_hiercomm import AllReduce, HeterogeneousBatches, HierarchicalStrategy


class Layers(pl.LightningModule):
    """About a millisecond of CPU time per sample."""

    def __init__(self, samples: int, rows: int = 64, width: int = 256) -> None:
        super().__init__()
        self.samples, self.rows, self.width = samples, rows, width
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh())]
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(self.samples, self.rows, self.width)), 16, shuffle=True)


class OnUnequalCpus(pl.Callback):
    """Gives every rank its share of a CPU, and writes down what each epoch took and how batches were divided."""

    def __init__(self, shares: list[float], path: Path) -> None:
        self.shares, self.path = shares, path
        self.record: dict[str, list] = {"seconds": [], "sizes": [], "cpu_seconds": []}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.set_num_threads(1)
        self.quota = CpuQuota(self.shares[trainer.global_rank])

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.barrier()
        self.begun, self.cpu_begun = time.perf_counter(), time.process_time()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        used = time.process_time() - self.cpu_begun
        trainer.strategy.barrier()
        self.record["seconds"].append(time.perf_counter() - self.begun)
        self.record["cpu_seconds"].append(used)
        batches = trainer.strategy.batches
        self.record["sizes"].append(list(batches.division.sizes))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.quota.close()
        del self.quota
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(self.record))


def epochs(batches: HeterogeneousBatches, shares: list[float], args: argparse.Namespace, count: int) -> dict:
    """What rank zero wrote down."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        pl.seed_everything(0, verbose=False)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=len(shares),
            strategy=HierarchicalStrategy(
                AllReduce(), batches, ranks_per_node=args.ranks_per_node if len(shares) > 1 else 1, start_method="fork"
            ),
            max_epochs=count,
            callbacks=[OnUnequalCpus(shares, path)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Layers(args.batch_size * args.steps))
        return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.4, 0.4, 0.4, 0.1], help="of a CPU, by rank")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128, help="samples per step, all ranks together")
    parser.add_argument("--steps", type=int, default=15, help="per epoch")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    shares, equal = args.shares, [1.0] * len(args.shares)

    alone = epochs(HeterogeneousBatches(args.batch_size), [1.0], args, 2)
    work = min(alone["cpu_seconds"])
    bound = work / sum(shares)
    print(f"{len(shares)} ranks with {shares} of a CPU, {args.batch_size} samples a step, {args.steps} steps an epoch")
    print(f"one process needs {work:.2f} CPU seconds an epoch: no division takes less than {bound:.2f} s\n")
    rows = {
        "equal": HeterogeneousBatches(args.batch_size, equal),
        "ideal (true shares given)": HeterogeneousBatches(args.batch_size, shares),
        "measured": HeterogeneousBatches(args.batch_size),
    }
    seconds = {}
    print("| batches | sizes | s per epoch, median | against equal | against ideal |\n|---|---|---|---|---|")
    for name, batches in rows.items():
        record = epochs(batches, shares, args, args.epochs)
        seconds[name] = statistics.median(record["seconds"])
        ideal = seconds.get("ideal (true shares given)")
        print(
            f"| {name} | {record['sizes'][-1]} | {seconds[name]:.2f} | {seconds['equal'] / seconds[name]:.2f} x faster"
            f" | {f'{seconds[name] / ideal - 1:+.1%}' if ideal else ''} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
