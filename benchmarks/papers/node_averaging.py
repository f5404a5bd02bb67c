"""000, node-based communication: what do averages every K' steps cost in accuracy, and how soon is the baseline met?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.papers.optimizers import OPTIMIZERS
from benchmarks.papers.perceptron import EXAMPLES, PERCEPTRON
from benchmarks.papers.pictures import legend, lines, panels, save
from benchmarks.papers.report import table
from benchmarks.papers.study import Results, Sample, Setting, Study
from lightning_hiercomm.planning.presets import PRESETS
from lightning_hiercomm.planning.simulation import Experiment
from lightning_hiercomm.planning.tasks import TASKS
from lightning_hiercomm.schemes import AllReduce, PeriodicAveraging, Scheme

NODES = (4, 8, 12, 16, 20)
EPOCHS = 16
SCHEMES: dict[str, tuple[str, Callable[[], Scheme]]] = {
    "AllReduce": ("all_reduce", AllReduce),
    "K' = 4": ("periodic", lambda: PeriodicAveraging(4)),
    "epoch ends": ("periodic", lambda: PeriodicAveraging(None)),
}
RATES = {0.1: "0.1, the paper's", 0.4: "0.4, four times the paper's"}
RECURRENT = ("rnn", "gru", "lstm")
RECURRENT_EPOCHS = 8
GAN_STEPS = 600
SHARES = (1.0, 0.98)
"""Of the baseline's best accuracy, that the method is timed to."""

_PAPER_NODES = {
    # ResNet-50: baseline and proposed on CIFAR-100, MA-acceleration, speedup in percent
    4: ("75.55 ± 0.75", "76.67 ± 0.40", "1.28", "@1"),
    8: ("72.64 ± 0.76", "74.94 ± 0.15", "1.47", "5.77"),
    12: ("74.35 ± 0.78", "76.33 ± 0.44", "2.40", "17.99"),
    16: ("73.34 ± 0.45", "75.36 ± 0.10", "2.22", "11.02"),
    20: ("71.97 ± 0.17", "75.05 ± 0.40", "2.61", "6.11"),
}
_PAPER_OPTIMIZERS = {
    "SGD": ("66.86 ± 2.19", "73.17 ± 0.15"),
    "Adam": ("74.35 ± 0.78", "76.33 ± 0.44"),
    "AdamW": ("69.50 ± 1.94", "71.92 ± 0.85"),
    "AdaBelief": ("55.28 ± 2.20", "68.37 ± 0.95"),
    "RMSprop": ("", ""),
}
_PAPER_RECURRENT = {
    "rnn": ("96.41 ± 0.27", "96.27 ± 0.12"),
    "gru": ("98.70 ± 0.06", "98.90 ± 0.08"),
    "lstm": ("98.67 ± 0.11", "98.85 ± 0.04"),
}


def _key(scheme: str, nodes: int, rate: float) -> str:
    return f"{scheme}; {nodes} nodes, learning rate {rate}"


def _on_nodes(seed: int, scheme: str, nodes: int, rate: float) -> Experiment:
    steps = round(EPOCHS * EXAMPLES / (PERCEPTRON.batch * nodes))
    return Experiment(scheme, SCHEMES[scheme][1](), nodes, steps, rate, PERCEPTRON.batch, PERCEPTRON, seed=seed)


def _with_optimizer(seed: int, scheme: str, optimizer: str) -> Experiment:
    rate, make = OPTIMIZERS[optimizer]
    steps = round(EPOCHS * EXAMPLES / (PERCEPTRON.batch * 12))
    return Experiment(
        scheme, SCHEMES[scheme][1](), 12, steps, rate, PERCEPTRON.batch, PERCEPTRON, seed=seed, optimizer=make
    )


def _recurrent(seed: int, scheme: str, cells: str) -> Experiment:
    """Two nodes of two ranks, and the doubled learning rate that the paper gives its method here."""
    task = TASKS[cells]
    (_, targets), _ = task.load()
    steps = round(RECURRENT_EPOCHS * len(targets) / (task.batch * 4))
    rate = task.learning_rate * (1.0 if scheme == "AllReduce" else 2.0)
    return Experiment(scheme, _rare(scheme), 2, steps, rate, task.batch, task, 2, seed=seed)


def _gan(seed: int, scheme: str) -> Experiment:
    task = TASKS["gan"]
    return Experiment(scheme, _rare(scheme), 4, GAN_STEPS, task.learning_rate, task.batch, task, seed=seed)


def _rare(scheme: str) -> Scheme:
    return AllReduce() if scheme == "AllReduce" else PeriodicAveraging(50)


def _settings() -> list[Setting]:
    site = PRESETS["000"].site
    nodes = [
        Setting(
            _key(scheme, count, rate), partial(_on_nodes, scheme=scheme, nodes=count, rate=rate), site, looks=EPOCHS
        )
        for count in NODES
        for scheme in SCHEMES
        for rate in RATES
    ]
    optimizers = [
        Setting(f"{scheme}; {name}", partial(_with_optimizer, scheme=scheme, optimizer=name), site, looks=EPOCHS)
        for name in OPTIMIZERS
        for scheme in ("AllReduce", "K' = 4")
    ]
    recurrent = [
        Setting(f"{scheme}; {cells}", partial(_recurrent, scheme=scheme, cells=cells), site, looks=RECURRENT_EPOCHS)
        for cells in RECURRENT
        for scheme in ("AllReduce", "K' = 50")
    ]
    gan = [
        Setting(f"{scheme}; gan", partial(_gan, scheme=scheme), site, looks=4) for scheme in ("AllReduce", "K' = 50")
    ]
    return [*nodes, *optimizers, *recurrent, *gan]


def _acceleration(results: Results, key: str, base: str, share: float) -> Sample:
    """The paper's MA-A: how much sooner than the baseline a method has the baseline's best accuracy, or a share."""
    bests = {seed: max(point[2] for point in run["points"]) for seed, run in results.runs[base].items()}

    def target(seed: int) -> float:
        return 100 * share * bests.get(seed, 1.0)

    def seconds(name: str, seed: int, percent: float) -> float | None:
        run = results.runs[name].get(seed, {"points": []})
        return next((point[1] for point in run["points"] if 100 * point[2] >= percent - 1e-9), None)

    pairs = [(seconds(base, seed, target(seed)), seconds(key, seed, target(seed))) for seed in results.runs[key]]
    found = [a / b if a and b else None for a, b in pairs]
    return Sample(tuple(value for value in found if value is not None), found.count(None))


def _reached(sample: Sample) -> str:
    if not sample.values:
        return "never" if sample.failed else ""
    missed = f" ({sample.failed} never)" if sample.failed else ""
    return f"{sample.mean:.2f}{missed}"


def _report(results: Results) -> str:
    parts = []
    for rate, words in RATES.items():
        rows = []
        for nodes in NODES:
            base = results.accuracy(_key("AllReduce", nodes, rate))
            cells = [str(nodes), base.text()]
            for scheme in list(SCHEMES)[1:]:
                key = _key(scheme, nodes, rate)
                own = results.accuracy(key)
                times = (_acceleration(results, key, _key("AllReduce", nodes, rate), share) for share in SHARES)
                cells += [own.text(), own.against(base), *map(_reached, times)]
            seconds = [results.seconds(_key(scheme, nodes, rate)).mean for scheme in ("AllReduce", "epoch ends")]
            cells.append(f"{100 * (seconds[0] / seconds[1] - 1):.1f} %")
            rows.append([*cells, *(_PAPER_NODES[nodes] if rate == 0.1 else ())])
        head = ["nodes", "AllReduce"]
        for scheme in list(SCHEMES)[1:]:
            head += [scheme, "difference", *(f"MA-A at {share:.2f}" for share in SHARES)]
        head.append("speedup, epoch ends")
        if rate == 0.1:
            head += ["paper: baseline", "proposed", "MA-A", "speedup %"]
        parts.append(
            f"**Table III, learning rate {words}.** Accuracy in % after {EPOCHS} epochs, batches of "
            f"{PERCEPTRON.batch} per node. MA-A: how much sooner the baseline's best accuracy is there (on the "
            "virtual clock; looked at once per"
            " epoch), and 0.98 of it.\n\n" + table(head, rows)
        )
    parts.append(
        "The paper's columns are ResNet-50 on CIFAR-100 (Table III), at a learning rate of 0.1 for both methods and "
        "all numbers of nodes."
    )
    rows = []
    for name in OPTIMIZERS:
        base, own = (results.accuracy(f"{scheme}; {name}") for scheme in ("AllReduce", "K' = 4"))
        rows.append([name, base.text(), own.text(), own.against(base), *_PAPER_OPTIMIZERS[name]])
    parts.append(
        "**Table IV, five optimizers** on 12 nodes, averages every 4 steps.\n\n"
        + table(["", "AllReduce", "proposed", "difference", "paper: baseline", "proposed"], rows)
    )
    rows = []
    for cells in RECURRENT:
        base, own = (results.accuracy(f"{scheme}; {cells}") for scheme in ("AllReduce", "K' = 50"))
        rows.append([cells.upper(), base.text(), own.text(), own.against(base), *_PAPER_RECURRENT[cells]])
    parts.append(
        "**Table VIII, recurrent networks** on two nodes of two ranks, K' = 50 and twice the learning rate, "
        f"{RECURRENT_EPOCHS} epochs of MNIST-1D read piece by piece.\n\n"
        + table(["", "AllReduce", "proposed", "difference", "paper: baseline", "proposed"], rows)
    )
    base, own = (results.accuracy(f"{scheme}; gan") for scheme in ("AllReduce", "K' = 50"))
    losses = [results.loss(f"{scheme}; gan") for scheme in ("AllReduce", "K' = 50")]
    parts.append(
        f"**Experiment 5, a GAN** of points in the plane on 4 nodes, K' = 50, {GAN_STEPS} steps, a scheme for each of"
        f" its two optimizers: score {base.text()} % with AllReduce, {own.text()} % with averages, difference "
        f"{own.against(base)}; the loss that the task judges by {losses[0].text(3)} and {losses[1].text(3)}. The "
        "paper shows lower losses of both parts for its method (Fig. 8) and no score."
    )
    return "\n\n".join(parts)


def _draw(results: Results, path: Path) -> None:
    figure, axes = panels(3)
    for axis, (rate, words) in zip(axes, RATES.items(), strict=False):
        samples = {scheme: [results.accuracy(_key(scheme, nodes, rate)) for nodes in NODES] for scheme in SCHEMES}
        lines(axis, NODES, samples, [row for row, _ in SCHEMES.values()])
        axis.set(xlabel="nodes", ylabel="accuracy, held out, %", xticks=NODES)
        axis.set_title(f"learning rate {words}", fontsize=9)
        legend(axis)
    places = range(len(OPTIMIZERS))
    samples = {s: [results.accuracy(f"{s}; {name}") for name in OPTIMIZERS] for s in ("AllReduce", "K' = 4")}
    lines(axes[2], places, samples, ["all_reduce", "periodic"])
    axes[2].set_xticks(places, list(OPTIMIZERS))
    axes[2].set_title("five optimizers on 12 nodes (Table IV)", fontsize=9)
    legend(axes[2])
    save(
        figure,
        path,
        f"Node-based communication: {PERCEPTRON.name}, {EPOCHS} epochs; bars: standard deviation of the seeds",
    )


STUDY = Study(
    "000",
    "node-based communication",
    "Moreno-Álvarez et al., Tables III, IV and VIII, Experiment 5. In the place of ResNets on CIFAR: a perceptron on"
    " MNIST-1D, nodes of one rank, momentum SGD with a cosine. The paper gives no K' for CIFAR: both 4 steps and "
    "epoch ends are here.",
    _settings,
    _report,
    _draw,
    "AngularGrad (no implementation in torch; RMSprop has its row); vision transformers, fine-grained data sets and "
    "ImageNet (Tables V to VII), which need a cluster: examples have their configurations.",
)
