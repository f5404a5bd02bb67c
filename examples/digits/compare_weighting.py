"""Does it matter how the gradients of unequal batches are weighted? Digits over five seeds; prints one table.

python examples/digits/compare_weighting.py
"""

import argparse

import lightning.pytorch as pl
from data import DigitsDataModule
from model import DigitsCNN
from study import Progress, be_quiet, mean_and_spread, train_and_test

from lightning_hiercomm import HeterogeneousBatches, HierarchicalStrategy, PeriodicAveraging


def train(speeds: list[float], weighting: str, seed: int, args: argparse.Namespace) -> float:
    """Accuracy of the agreed model on the test scans."""
    pl.seed_everything(seed, verbose=False)
    strategy = HierarchicalStrategy(
        PeriodicAveraging(args.sync_every),
        HeterogeneousBatches(args.batch_size, speeds, weighting),
        ranks_per_node=args.ranks_per_node,
        start_method="fork",
    )
    accuracy, _ = train_and_test(DigitsCNN(), DigitsDataModule(), strategy, ranks=len(speeds), epochs=args.epochs)
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", type=float, nargs="+", default=[16, 4, 2, 1], help="of the ranks")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="scans per step, all ranks together")
    parser.add_argument("--sync-every", type=int, default=1, help="steps between agreements of the nodes")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    be_quiet()
    rows = {
        "equal batches": ([1.0] * len(args.speeds), "samples"),
        "unequal, weighted by samples": (args.speeds, "samples"),
        "unequal, weighted by speed": (args.speeds, "speed"),
        "unequal, unweighted": (args.speeds, "none"),
    }
    print(f"speeds {args.speeds}, {args.batch_size} scans a step, {args.epochs} epochs; test accuracy in %\n")
    progress = Progress(len(rows) * args.seeds)
    print(f"| batches | mean | between seeds | {' | '.join(f'seed {seed}' for seed in range(args.seeds))} |")
    print("|---|---|---|" + "---|" * args.seeds, flush=True)
    for name, (speeds, weighting) in rows.items():
        runs = []
        for seed in range(args.seeds):
            progress(f"{name}, seed {seed}")
            runs.append(100 * train(speeds, weighting, seed, args))
        mean, spread = mean_and_spread(runs)
        print(
            f"| {name} | {mean} | {spread} | {' | '.join(f'{run:.2f}' for run in runs)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
