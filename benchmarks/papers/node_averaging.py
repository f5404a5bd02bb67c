"""000, node-based communication: what do averages every K' steps cost in accuracy, and how soon is the baseline met?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.papers.optimizers import OPTIMIZERS
from benchmarks.papers.perceptron import EXAMPLES, PERCEPTRON
from benchmarks.papers.pictures import legend, lines, panels, save
from benchmarks.papers.report import table
from benchmarks.papers.sites import SITES
from benchmarks.papers.study import Results, Sample, Setting, Study
from benchmarks.simulate.simulation import Experiment
from benchmarks.zoo import TASKS
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


def _with_optimizer(seed: int, scheme: str, optimizer: str, times: float) -> Experiment:
    rate, make = OPTIMIZERS[optimizer]
    rate *= times
    steps = round(EPOCHS * EXAMPLES / (PERCEPTRON.batch * 12))
    return Experiment(
        scheme, SCHEMES[scheme][1](), 12, steps, rate, PERCEPTRON.batch, PERCEPTRON, seed=seed, optimizer=make
    )


def _with(scheme: str, what: str, times: float) -> str:
    return f"{scheme}; {what}" + (f", {times:g} times the learning rate" if times != 1 else "")


def _recurrent(seed: int, scheme: str, cells: str, times: float) -> Experiment:
    """Two nodes of two ranks; the paper doubles the learning rate of its method here."""
    task = TASKS[cells]
    steps = round(RECURRENT_EPOCHS * EXAMPLES / (task.batch * 4))
    return Experiment(scheme, _rare(scheme), 2, steps, task.learning_rate * times, task.batch, task, 2, seed=seed)


def _gan(seed: int, scheme: str) -> Experiment:
    task = TASKS["gan"]
    return Experiment(scheme, _rare(scheme), 4, GAN_STEPS, task.learning_rate, task.batch, task, seed=seed)


def _rare(scheme: str) -> Scheme:
    return AllReduce() if scheme == "AllReduce" else PeriodicAveraging(50)


def _setting(key: str, make: Callable[..., Experiment], looks: int, **arguments: Any) -> Setting:
    return Setting(key, partial(make, **arguments), SITES["000"], looks=looks)


def _settings() -> list[Setting]:
    nodes = [
        _setting(_key(scheme, count, rate), _on_nodes, EPOCHS, scheme=scheme, nodes=count, rate=rate)
        for count in NODES
        for scheme in SCHEMES
        for rate in RATES
    ]
    optimizers = [
        _setting(_with(scheme, name, times), _with_optimizer, EPOCHS, scheme=scheme, optimizer=name, times=times)
        for name in OPTIMIZERS
        for scheme, times in (("AllReduce", 1), ("K' = 4", 1), ("K' = 4", 2))
    ]
    recurrent = [
        _setting(_with(scheme, cells, times), _recurrent, RECURRENT_EPOCHS, scheme=scheme, cells=cells, times=times)
        for cells in RECURRENT
        for scheme, times in (("AllReduce", 1), ("AllReduce", 2), ("K' = 50", 2))
    ]
    gan = [_setting(f"{scheme}; gan", _gan, 4, scheme=scheme) for scheme in ("AllReduce", "K' = 50")]
    return [*nodes, *optimizers, *recurrent, *gan]


def _acceleration(results: Results, key: str, base: str, share: float, column: int = 1) -> Sample:
    """The paper's MA-A: how much sooner than the baseline a method has the baseline's best accuracy, or a share of it.

    Args:
        results: Of this study.
        key: Of the method.
        base: Of the baseline.
        share: Of the baseline's best accuracy.
        column: What counts: 0 steps, 1 seconds of the virtual clock.
    """
    baseline = results.runs[base]

    def when(run: Mapping[str, Any], accuracy: float) -> float | None:
        return next((point[column] for point in run["points"] if point[2] >= accuracy - 1e-9), None)

    found: dict[int, float | None] = {}
    for seed, run in results.runs[key].items():
        if seed in baseline:
            target = share * max(point[2] for point in baseline[seed]["points"])
            own, theirs = when(run, target), when(baseline[seed], target)
            found[seed] = theirs / own if own and theirs else None
    return Sample(found)


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
                baseline = _key("AllReduce", nodes, rate)
                times = [_acceleration(results, key, baseline, share) for share in SHARES]
                times.append(_acceleration(results, key, baseline, 1.0, column=0))
                cells += [own.text(), own.against(base), *map(_reached, times)]
            seconds = [results.seconds(_key(scheme, nodes, rate)).mean for scheme in ("AllReduce", "epoch ends")]
            cells.append(f"{100 * (seconds[0] / seconds[1] - 1):.1f} %")
            rows.append([*cells, *(_PAPER_NODES[nodes] if rate == 0.1 else ())])
        head = ["nodes", "AllReduce"]
        for scheme in list(SCHEMES)[1:]:
            head += [scheme, "difference", *(f"MA-A at {share:.2f}" for share in SHARES), "in epochs"]
        head.append("speedup, epoch ends")
        if rate == 0.1:
            head += ["paper: baseline", "proposed", "MA-A", "speedup %"]
        parts.append(
            f"**Table III, learning rate {words}.** Accuracy in % after {EPOCHS} epochs, batches of "
            f"{PERCEPTRON.batch} per node. MA-A: how much sooner the baseline's best accuracy, or 0.98 of it, is "
            "reached; on the virtual clock (ResNet-50, 80 ms per step, 10 Gbit/s) and, whatever the network, in "
            "epochs. Looked at once per epoch.\n\n" + table(head, rows)
        )
    parts.append(
        "The paper's columns are ResNet-50 on CIFAR-100 (Table III) on 100 Gbit/s InfiniBand, at a learning rate of "
        "0.1 for both methods and all numbers of nodes. Its speedup is what its own program gains there."
    )
    rows = []
    for name in OPTIMIZERS:
        base, own, faster = (
            results.accuracy(_with(scheme, name, times))
            for scheme, times in (("AllReduce", 1), ("K' = 4", 1), ("K' = 4", 2))
        )
        cells = [name, base.text(), own.text(), own.against(base), faster.text(), faster.against(base)]
        rows.append([*cells, *_PAPER_OPTIMIZERS[name]])
    head = ["", "AllReduce", "K' = 4", "difference", "K' = 4, twice the rate", "difference"]
    parts.append(
        "**Table IV, five optimizers** on 12 nodes, averages every 4 steps.\n\n"
        + table([*head, "paper: baseline", "proposed"], rows)
    )
    rows = []
    for name in RECURRENT:
        base, faster, own = (
            results.accuracy(_with(scheme, name, times))
            for scheme, times in (("AllReduce", 1), ("AllReduce", 2), ("K' = 50", 2))
        )
        cells = [name.upper(), base.text(), own.text(), own.against(base), faster.text(), own.against(faster)]
        rows.append([*cells, *_PAPER_RECURRENT[name]])
    head = ["", "AllReduce", "K' = 50, twice the rate", "difference", "AllReduce, twice the rate", "difference"]
    parts.append(
        f"**Table VIII, recurrent networks** on two nodes of two ranks, {RECURRENT_EPOCHS} epochs of MNIST-1D read "
        "piece by piece. The paper doubles its method's learning rate and not the baseline's.\n\n"
        + table([*head, "paper: baseline", "proposed"], rows)
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
    samples = {s: [results.accuracy(_with(s, name, 1)) for name in OPTIMIZERS] for s in ("AllReduce", "K' = 4")}
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
    "ImageNet (Tables V to VII), which need a cluster: examples/papers has configurations.",
)
