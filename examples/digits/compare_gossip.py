"""Trains the digits CNN on eight ranks with all-reduce and with each kind of gossip; prints one table.

python examples/digits/compare_gossip.py
python examples/digits/compare_gossip.py --optimizer lars --batch-size 64
"""

import argparse
import statistics

import lightning.pytorch as pl
from data import DigitsDataModule
from lightning.pytorch.callbacks import Callback
from model import DigitsCNN
from study import Progress, be_quiet, mean_and_spread, train_and_test

from lightning_hiercomm import AllReduce, Gossip, HierarchicalStrategy

# Eight nodes of one rank, where hierarchical and flat gossip are the same; the last row has four nodes of two.
ROWS = {
    "all-reduce": (AllReduce(), 1),
    "SGP": (Gossip("directed_exponential", segments=1), 1),
    "Crossover without fairness": (Gossip(fair=None), 1),
    "Crossover": (Gossip(), 1),
    "hierarchical Crossover, 4 x 2": (Gossip(), 2),
}


class LogCommunication(Callback):
    """Brings rank zero's counters back from the process that trained."""

    def __init__(self) -> None:
        self.disagreement = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.disagreement = max(self.disagreement, trainer.strategy.communication().get("disagreement", 0.0))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        values = trainer.strategy.communication()
        pl_module.log("inter_bytes_per_step", values["inter_bytes"] / values["steps"])
        pl_module.log("disagreement", self.disagreement)


def train(scheme, ranks_per_node: int, seed: int, args: argparse.Namespace) -> tuple[float, float, float]:
    """Accuracy of the agreed model on the test scans, inter-node bytes per node and step, peak disagreement."""
    pl.seed_everything(seed, verbose=False)
    accuracy, logged = train_and_test(
        DigitsCNN(optimizer=args.optimizer, lr=args.lr),
        DigitsDataModule(args.batch_size),
        HierarchicalStrategy(scheme, ranks_per_node=ranks_per_node, start_method="fork"),
        ranks=args.ranks,
        epochs=args.epochs,
        callbacks=[LogCommunication()],
    )
    # each rank of a node sends an equal part
    return accuracy, logged["inter_bytes_per_step"] * ranks_per_node, logged["disagreement"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16, help="scans per rank and step")
    parser.add_argument("--optimizer", choices=["adam", "lars"], default="adam")
    parser.add_argument("--lr", type=float, help="peak learning rate; default: the model's own for the optimizer")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    be_quiet()
    print(f"{args.ranks} ranks x {args.batch_size} scans, {args.epochs} epochs, {args.optimizer}, {args.seeds} seeds\n")
    progress = Progress(len(ROWS) * args.seeds)
    print("| scheme | test accuracy, % | between seeds | inter-node kB per node and step | peak disagreement |")
    print("|---|---|---|---|---|", flush=True)
    for name, (scheme, ranks_per_node) in ROWS.items():
        runs = []
        for seed in range(args.seeds):
            progress(f"{name}, seed {seed}")
            runs.append(train(scheme, ranks_per_node, seed, args))
        accuracies, sent, disagreement = zip(*runs, strict=True)
        mean, spread = mean_and_spread([100 * accuracy for accuracy in accuracies])
        print(
            f"| {name} | {mean} | {spread} | {statistics.mean(sent) / 1e3:.1f} | {statistics.mean(disagreement):.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
