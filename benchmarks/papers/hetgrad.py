"""004, HetGrad: unequal ranks take unequal batches; what should their gradients weigh?"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.papers.perceptron import EXAMPLES, PERCEPTRON
from benchmarks.papers.pictures import legend, panels, save
from benchmarks.papers.report import table
from benchmarks.papers.sites import SITES
from benchmarks.papers.study import Results, Setting, Study
from benchmarks.simulate.simulation import Experiment
from benchmarks.simulate.tasks import momentum_sgd
from benchmarks.zoo import adam
from lightning_hiercomm.batches.partition import StepCost, Weighting, divide, rank_weights
from lightning_hiercomm.schemes import AllReduce

GLOBAL_BATCH = 64
EPOCHS = 16
SPEEDS = {3: (20.0, 4.0, 1.0), 4: (20.0, 10.0, 4.0, 1.0)}
"""By the number of ranks; samples per second of each, in any unit."""
OPTIMIZERS = {"SGD": (0.2, momentum_sgd), "Adam": (0.004, adam)}
"""With their learning rates."""
WEIGHTINGS: dict[str, Weighting] = {
    "none (Eq. 1, the baseline)": "none",
    "samples": "samples",
    "speed": "speed",
}

_PAPER = {
    # CIFAR-100: baseline, HetGrad, seconds of an epoch with balanced and equal batches
    "VGG16": ("56.24 ± 0.16", "67.02 ± 0.31", "25.87", "194.67", "7.82"),
    "ResNet18": ("68.58 ± 1.32", "71.28 ± 0.30", "32.10", "314.56", "9.79"),
    "ResNet50": ("68.70 ± 1.83", "73.08 ± 0.32", "86.45", "1014.25", "11.73"),
    "DenseNet121": ("71.81 ± 1.92", "73.39 ± 0.19", "80.01", "952.34", "11.90"),
}


def batches_of(ranks: int) -> list[int]:
    """What the package gives ranks of these speeds."""
    return divide(GLOBAL_BATCH, [StepCost(0.0, speed) for speed in SPEEDS[ranks]])


def seconds_of_step(ranks: int, batches: list[int]) -> float:
    """Until the slowest has finished, without communication; in the unit of the speeds."""
    return max(size / speed for size, speed in zip(batches, SPEEDS[ranks], strict=True))


def _key(ranks: int, optimizer: str, weighting: str) -> str:
    return f"{ranks} ranks, {optimizer}, {weighting}"


def _make(seed: int, ranks: int, optimizer: str, weighting: str) -> Experiment:
    rate, make = OPTIMIZERS[optimizer]
    sizes, speeds = batches_of(ranks), SPEEDS[ranks]
    return Experiment(
        weighting,
        AllReduce(),
        ranks,
        round(EPOCHS * EXAMPLES / GLOBAL_BATCH),
        rate,
        GLOBAL_BATCH // ranks,
        PERCEPTRON,
        seed=seed,
        optimizer=make,
        batches=tuple(sizes),
        weights=tuple(rank_weights(WEIGHTINGS[weighting], sizes, speeds)),
    )


def _settings() -> list[Setting]:
    return [
        Setting(
            _key(ranks, optimizer, weighting),
            partial(_make, ranks=ranks, optimizer=optimizer, weighting=weighting),
            SITES["000"],
            looks=EPOCHS,
        )
        for ranks in SPEEDS
        for optimizer in OPTIMIZERS
        for weighting in WEIGHTINGS
    ]


def _report(results: Results) -> str:
    parts = []
    for optimizer, (rate, _) in OPTIMIZERS.items():
        rows = []
        for weighting in WEIGHTINGS:
            cells = [weighting]
            for ranks in SPEEDS:
                own = results.accuracy(_key(ranks, optimizer, weighting))
                base = results.accuracy(_key(ranks, optimizer, next(iter(WEIGHTINGS))))
                cells += [own.text(), "" if own == base else own.against(base)]
            rows.append(cells)
        head = ["weighting"]
        for ranks, speeds in SPEEDS.items():
            shown = ", ".join(f"{speed:g}" for speed in speeds)
            head += [f"{ranks} ranks of speeds {shown}", "against none"]
        parts.append(
            f"**Table 1, what gradients weigh**, {optimizer} at {rate:g}, a global batch of {GLOBAL_BATCH}, accuracy "
            "in %.\n\n" + table(head, rows)
        )
    rows = []
    for ranks, speeds in SPEEDS.items():
        sizes, equal = batches_of(ranks), divide(GLOBAL_BATCH, [StepCost(0.0, 1.0)] * ranks)
        faster = seconds_of_step(ranks, equal) / seconds_of_step(ranks, sizes)
        rows.append([f"{speeds}", f"{equal}", f"{sizes}", f"{faster:.1f}x"])
    parts.append(
        "**Table 2, time saved by balancing**, by arithmetic: a step lasts until the slowest rank has finished. The "
        "paper's 7.8x to 11.9x is against equal batches on its own cluster. Measured with real processes, one of "
        "which a quota slows down: `python -m benchmarks.studies.batches`.\n\n"
        + table(["speeds", "equal batches", "by speed", "faster"], rows, left=3)
    )
    paper = [[model, *cells] for model, cells in _PAPER.items()]
    parts.append(
        "The paper's Tables 1 and 2, CIFAR-100 on four unequal replicas, five runs:\n\n"
        + table(["", "baseline, %", "HetGrad, %", "balanced, s per epoch", "equal", "speedup"], paper)
    )
    return "\n\n".join(parts)


def _draw(results: Results, path: Path) -> None:
    figure, axes = panels(len(OPTIMIZERS))
    cells = [(max(SPEEDS), optimizer) for optimizer in OPTIMIZERS]
    for axis, (ranks, optimizer) in zip(axes, cells, strict=True):
        for index, weighting in enumerate(WEIGHTINGS):
            runs = results.runs[_key(ranks, optimizer, weighting)].values()
            points = [run["points"] for run in runs if not run["error"]]
            if points:
                epochs = range(1, 1 + min(map(len, points)))
                means = [sum(100 * run[i][2] for run in points) / len(points) for i in range(len(epochs))]
                axis.plot(epochs, means, label=weighting, color=f"C{index}")
        axis.set(xlabel="epochs", title=f"{ranks} ranks, {optimizer} at {OPTIMIZERS[optimizer][0]:g}")
    axes[0].set_ylabel("accuracy, held out, %")
    legend(axes[1])
    save(figure, path, f"HetGrad's weights: {PERCEPTRON.name}, a global batch of {GLOBAL_BATCH}; means over the seeds")


STUDY = Study(
    "004",
    "HetGrad",
    "Moreno-Álvarez et al., Tables 1 and 2, Figures 2 and 3. In the place of VGG and ResNets on CIFAR: a perceptron "
    "on MNIST-1D. The batches are those that `HeterogeneousBatches` gives ranks of these speeds, and so are the "
    "weights.",
    _settings,
    _report,
    _draw,
    "Mini-ImageNet (Table 3) and AdamW, RMSprop and AdaBelief (Fig. 4).",
)
