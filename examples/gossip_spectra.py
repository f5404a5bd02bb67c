"""Draw how fast gossip graphs mix, as in Figure 6 of Crossover-SGD.

The upper plot is the second-largest absolute eigenvalue of the product of the first k mixing matrices. It bounds the
averaging error after k steps. The lower plot is the imbalance: the root mean square difference of that product from
1/n, the matrix of an all-reduce. Curves of random graphs are means over seeds, and bands contain 80 % of the seeds.

Without fairness the paper uses (I + Pi) / 2 with independent picks Pi. That matrix is row-stochastic only, so its
imbalance does not vanish. `Gossip` uses push-sum weights, with which z = x / w converges to the mean: the last curve.

python examples/gossip_spectra.py --ranks 16 --steps 24 --output gossip_spectra.png
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import matplotlib
import torch
from torch import Tensor

from lightning_hiercomm import DirectedExponential, Graph, RandomPermutation, Ring
from lightning_hiercomm.schemes.reducers.graphs import partners_of

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def mixing_matrices(graph: Graph, ranks: int, steps: int) -> Iterator[Tensor]:
    """Yield the mixing matrix of each step, as the paper defines it."""
    for step in range(steps):
        if isinstance(graph, RandomPermutation):
            identity = torch.eye(ranks, dtype=torch.float64)
            yield (identity + identity[graph.receive_from(ranks, step, 0)]) / 2
        else:
            yield partners_of(graph, ranks, step).mixing_matrix()


def products(graph: Graph, ranks: int, steps: int, push_sum: bool) -> Iterator[Tensor]:
    """Yield the product of the first k mixing matrices, for k = 1, 2, ..."""
    product = torch.eye(ranks, dtype=torch.float64)
    if push_sum:
        for step in range(steps):
            product = partners_of(graph, ranks, step).mixing_matrix() @ product
            yield product / product.sum(1, keepdim=True)  # z = x / w
    else:
        for matrix in mixing_matrices(graph, ranks, steps):
            product = matrix @ product
            yield product


def second_eigenvalue(product: Tensor) -> float:
    """Return the second-largest absolute eigenvalue.

    The eigenvalue 1 of the mean is subtracted: among many zeros LAPACK does not always find the next one.
    """
    return torch.linalg.eigvals(product - 1 / len(product)).abs().max().item()


def imbalance(product: Tensor) -> float:
    """Return the root mean square difference from 1/n."""
    return (product - 1 / len(product)).square().mean().sqrt().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--output", default="gossip_spectra.png")
    args = parser.parse_args()
    torch.set_num_threads(1)
    curves = {
        "ring (DP-SGD)": ([Ring()], False),
        "directed exponential (SGP)": ([DirectedExponential()], False),
        "random permutation, uniform": ([RandomPermutation("uniform", s) for s in range(args.seeds)], False),
        "random permutation, cyclic": ([RandomPermutation("cyclic", s) for s in range(args.seeds)], False),
        "random permutation, roulette": ([RandomPermutation("roulette", s) for s in range(args.seeds)], False),
        "random without fairness": ([RandomPermutation("independent", s) for s in range(args.seeds)], False),
        "random without fairness, push-sum": ([RandomPermutation("independent", s) for s in range(args.seeds)], True),
    }
    figure, axes = plt.subplots(2, 1, figsize=(7, 8), sharex=True)
    shown = [k for k in (1, 2, 4, 8, 16, 24, 32) if k <= args.steps]
    print(f"{args.ranks} ranks: |lambda_2| / imbalance after k steps")
    print("| graph | " + " | ".join(f"k = {k}" for k in shown) + " |")
    print("|---" * (len(shown) + 1) + "|")
    for name, (graphs, push_sum) in curves.items():
        runs = [list(products(graph, args.ranks, args.steps, push_sum)) for graph in graphs]
        measured = []
        for axis, measure in zip(axes, (second_eigenvalue, imbalance), strict=True):
            curves_of_seeds = torch.tensor([[measure(product) for product in run] for run in runs])
            curve, steps = curves_of_seeds.mean(0), range(1, args.steps + 1)
            (line,) = axis.semilogy(steps, curve.clamp_min(1e-9), label=name)
            low, high = curves_of_seeds.quantile(torch.tensor([0.1, 0.9]), 0).clamp_min(1e-9)
            axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            measured.append(curve)
        cells = (f"{measured[0][k - 1]:.4f} / {measured[1][k - 1]:.5f}" for k in shown)
        print(f"| {name} | " + " | ".join(cells) + " |")
    axes[0].set_ylabel("second-largest |eigenvalue|")
    axes[1].set_ylabel("imbalance (RMS difference from 1/n)")
    axes[1].set_xlabel("averaging steps k")
    for axis in axes:
        axis.set_ylim(1e-6, None)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    axes[0].set_title(
        f"How fast gossip graphs mix on {args.ranks} ranks; bands: 80 % of {args.seeds} seeds", fontsize=11
    )
    figure.tight_layout()
    figure.savefig(args.output, dpi=120)
    print(f"\nwrote {args.output}")


if __name__ == "__main__":
    main()
