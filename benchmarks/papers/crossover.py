"""003, Crossover-SGD: who keeps the accuracy when the mini-batch grows, and when the number of replicas does?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.papers.perceptron import EXAMPLES, PERCEPTRON
from benchmarks.papers.pictures import legend, lines, panels, save
from benchmarks.papers.report import table
from benchmarks.papers.sites import SITES
from benchmarks.papers.study import Results, Setting, Study
from benchmarks.simulate.simulation import Experiment
from lightning_hiercomm.schemes import AllReduce, DirectedExponential, Gossip, RandomPermutation, Ring, Scheme

TASK = PERCEPTRON
EPOCHS = 24
FRAGMENTS = 4
REPLICAS = (8, 16, 32, 64)
FIXED = 1024
"""The mini-batch that more and more replicas share."""
RATES = {256: (1.0, 2.0, 4.0), FIXED: (1.0, 2.0, 4.0, 8.0), 2048: (2.0, 4.0, 8.0)}
"""By the mini-batch of 8 replicas; times the rate that the square root of the mini-batch gives."""
MINI_BATCHES = tuple(RATES)
HIGH = 4.0
"""The rate with which more and more replicas train: the one at which methods come apart."""

Maker = Callable[[], Scheme]

FLAT: dict[str, tuple[str, Maker]] = {
    "AllReduce": ("all_reduce", AllReduce),
    "Crossover-SGD": ("gossip", lambda: Gossip(fragments=FRAGMENTS)),
    "SGP": ("torchft", lambda: Gossip(DirectedExponential(), fragments=1)),
}
ABLATIONS: dict[str, tuple[str, Maker]] = {
    "Crossover-SGD, one fragment": ("hand", lambda: Gossip(fragments=1)),
    "Crossover-SGD, unfair": (
        "hand",
        lambda: Gossip(RandomPermutation("independent"), FRAGMENTS, push_sum=False),
    ),
    "Crossover-SGD, unfair, one fragment": (
        "hand",
        lambda: Gossip(RandomPermutation("independent"), 1, push_sum=False),
    ),
    "ring (DP-SGD's graph)": ("accelerate", lambda: Gossip("ring", fragments=1)),
}
HIERARCHICAL = {f"hierarchical Crossover-SGD, {groups} groups": groups for groups in (4, 8, 16)}
METHODS = {**FLAT, **ABLATIONS}
GRAPHS = ("ring", "SGP", "uniform", "cyclic", "roulette", "unfair", "unfair, push-sum")
SHOWN = (1, 2, 4, 8, 16)


def _key(method: str, replicas: int, mini_batch: int, rate: float = 1.0) -> str:
    return f"{method}; {replicas} replicas, mini-batch {mini_batch}, rate x{rate:g}"


def _make(seed: int, method: str, replicas: int, mini_batch: int, rate: float) -> Experiment:
    groups = HIERARCHICAL.get(method)
    scheme = Gossip(fragments=FRAGMENTS) if groups else METHODS[method][1]()
    nodes = groups or replicas
    batch = mini_batch // replicas
    steps = round(EPOCHS * EXAMPLES / mini_batch)
    highest = TASK.learning_rate * (mini_batch / TASK.batch) ** 0.5 * rate
    return Experiment(method, scheme, nodes, steps, highest, batch, TASK, replicas // nodes, seed=seed)


def _setting(method: str, replicas: int, mini_batch: int, rate: float = 1.0) -> Setting:
    make = partial(_make, method=method, replicas=replicas, mini_batch=mini_batch, rate=rate)
    return Setting(_key(method, replicas, mini_batch, rate), make, SITES["003"], looks=5)


def _settings() -> list[Setting]:
    tuned = [_setting(method, 8, size, rate) for size, rates in RATES.items() for method in FLAT for rate in rates]
    more = [
        _setting(method, replicas, FIXED, HIGH) for replicas in REPLICAS[1:] for method in FLAT if method != "AllReduce"
    ]
    ablations = [_setting(method, replicas, FIXED, HIGH) for replicas in (16, 32) for method in ABLATIONS]
    groups = [
        _setting(method, replicas, FIXED, HIGH)
        for method, count in HIERARCHICAL.items()
        for replicas in (16, 32)
        if replicas > count
    ]
    return [*tuned, *more, *ablations, *groups]


# ---- Figure 6: how fast the graphs mix -------------------------------------------------------------------------


def _spectra() -> dict[str, Any]:
    """The second eigenvalue and the imbalance after so many averaging steps, the mean over 20 draws."""
    from examples.gossip_spectra import imbalance, products, second_eigenvalue

    drawn = 20
    graphs: dict[str, tuple[list[Any], bool]] = {
        "ring": ([Ring()], False),
        "SGP": ([DirectedExponential()], False),
        **{
            sampling: ([RandomPermutation(sampling, s) for s in range(drawn)], False)
            for sampling in ("uniform", "cyclic", "roulette")
        },  # type: ignore[arg-type]
        "unfair": ([RandomPermutation("independent", s) for s in range(drawn)], False),
        "unfair, push-sum": ([RandomPermutation("independent", s) for s in range(drawn)], True),
    }
    found: dict[str, Any] = {}
    for ranks in REPLICAS:
        for name, (of_seeds, push_sum) in graphs.items():
            runs = [list(products(graph, ranks, SHOWN[-1], push_sum)) for graph in of_seeds]
            for measure in (second_eigenvalue, imbalance):
                means = [sum(measure(run[step]) for run in runs) / len(runs) for step in range(SHOWN[-1])]
                found.setdefault(measure.__name__, {}).setdefault(str(ranks), {})[name] = means
    return found


# ---- what came out ---------------------------------------------------------------------------------------------


def _report(results: Results) -> str:
    return "\n\n".join([_rates(results), _growing(results), _more(results), _mixing(results), _PAPER])


def _tuned(results: Results, method: str, mini_batch: int) -> str:
    return results.best_of([_key(method, 8, mini_batch, rate) for rate in RATES[mini_batch]])


def _rates(results: Results) -> str:
    rows = [
        [
            method,
            *(results.accuracy(_key(method, 8, FIXED, rate)).text() for rate in RATES[FIXED]),
            _range(results, method),
        ]
        for method in FLAT
    ]
    text = f"**Figure 8, how much the learning rate matters**: 8 replicas, mini-batch {FIXED}, {EPOCHS} epochs, %."
    return f"{text}\n\n" + table(["", *(f"rate x{rate:g}" for rate in RATES[FIXED]), "best less worst"], rows)


def _range(results: Results, method: str) -> str:
    means = [sample.mean for rate in RATES[FIXED] if (sample := results.accuracy(_key(method, 8, FIXED, rate))).values]
    return f"{max(means) - min(means):.1f}" if means else ""


def _growing(results: Results) -> str:
    head = [
        "",
        *(f"mini-batch {size}" for size in MINI_BATCHES),
        *(f"against AllReduce, {size}" for size in MINI_BATCHES),
    ]
    rows = []
    for method in FLAT:
        own = [results.accuracy(_tuned(results, method, size)) for size in MINI_BATCHES]
        base = [results.accuracy(_tuned(results, "AllReduce", size)) for size in MINI_BATCHES]
        apart = ["" if method == "AllReduce" else a.against(b) for a, b in zip(own, base, strict=True)]
        rows.append([method, *(sample.text() for sample in own), *apart])
    return (
        "**Figure 9, a growing mini-batch on 8 replicas**, each method at the better of its learning rates.\n\n"
        + table(head, rows)
    )


def _more(results: Results) -> str:
    base = results.accuracy(_tuned(results, "AllReduce", FIXED))
    rows = [["AllReduce, at its best rate", base.text(), *("as with 8" for _ in REPLICAS[1:]), "", ""]]
    for method in [*list(FLAT)[1:], *ABLATIONS, *HIERARCHICAL]:
        samples = [results.accuracy(_key(method, replicas, FIXED, HIGH)) for replicas in REPLICAS]
        others = [results.accuracy(_key(name, 32, FIXED, HIGH)) for name in ("SGP", "Crossover-SGD")]
        apart = ["" if samples[2] == other else samples[2].against(other) for other in others]
        rows.append([method, *(sample.text() for sample in samples), *apart])
    text = f"**Figure 10, more replicas share a mini-batch of {FIXED}**; gossip at rate x{HIGH:g}."
    head = ["", *(f"{count} replicas" for count in REPLICAS), "32: against SGP", "32: against Crossover-SGD"]
    return f"{text}\n\n" + table(head, rows)


def _mixing(results: Results) -> str:
    if not results.extra:
        return ""
    eigenvalue, apart = results.extra["second_eigenvalue"]["16"], results.extra["imbalance"]["16"]
    rows = [
        [graph, *(f"{eigenvalue[graph][step - 1]:.3f} / {apart[graph][step - 1]:.4f}" for step in SHOWN)]
        for graph in GRAPHS
    ]
    return (
        "**Figure 6, how fast the graphs mix 16 replicas**: second eigenvalue of the product of the first k mixing "
        "matrices /"
        " imbalance (root mean square difference from 1/n).\n\n" + table(["", *(f"k = {step}" for step in SHOWN)], rows)
    )


_PAPER = (
    "The paper (ResNet-50, ImageNet, LARS; figures without printed numbers but AllReduce's 75.67 % at a mini-batch "
    "of 86,016) says: Crossover-SGD is the most robust to the learning rate and AllReduce the least (Fig. 8); with 8"
    " workers both gossip methods end above AllReduce when the mini-batch grows (Fig. 9); with more workers they "
    "lose, SGP more than Crossover-SGD, and leaving out fragments or fairness costs accuracy at every size (Fig. 10);"
    " hierarchical Crossover-SGD with 16 groups is like Crossover-SGD with 16 processes; the graphs mix faster than "
    "SGP's at first, and without fairness the imbalance does not vanish (Fig. 6)."
)


def _draw(results: Results, path: Path) -> None:
    figure, (rates, growing, more) = panels(3)
    rows = [row for row, _ in FLAT.values()]
    lines(
        rates,
        RATES[FIXED],
        {m: [results.accuracy(_key(m, 8, FIXED, rate)) for rate in RATES[FIXED]] for m in FLAT},
        rows,
    )
    rates.set(xscale="log", xlabel="learning rate, times the square root rule's", ylabel="accuracy, held out, %")
    rates.set_title(f"8 replicas, mini-batch {FIXED} (Fig. 8)", fontsize=9)
    rates.set_xticks(RATES[FIXED], [f"{rate:g}" for rate in RATES[FIXED]])
    lines(
        growing,
        MINI_BATCHES,
        {m: [results.accuracy(_tuned(results, m, size)) for size in MINI_BATCHES] for m in FLAT},
        rows,
    )
    growing.set(xscale="log", xlabel="mini-batch of 8 replicas")
    growing.set_title("a growing mini-batch, at tuned learning rates (Fig. 9)", fontsize=9)
    growing.set_xticks(MINI_BATCHES, [str(size) for size in MINI_BATCHES])
    scaled = {**{m: METHODS[m][0] for m in (*list(FLAT)[1:], *ABLATIONS)}, **dict.fromkeys(HIERARCHICAL, "gossip")}
    lines(
        more,
        REPLICAS,
        {m: [results.accuracy(_key(m, count, FIXED, HIGH)) for count in REPLICAS] for m in scaled},
        list(scaled.values()),
    )
    base = results.accuracy(_tuned(results, "AllReduce", FIXED)).mean
    more.axhline(base, color="black", linestyle=":", linewidth=1, label="AllReduce")
    more.set(xscale="log", xlabel=f"replicas that share a mini-batch of {FIXED}")
    more.set_title("more replicas (Fig. 10)", fontsize=9)
    more.set_xticks(REPLICAS, [str(count) for count in REPLICAS])
    for axis in (rates, growing, more):
        axis.minorticks_off()
        legend(axis)
    save(figure, path, f"Crossover-SGD: {TASK.name}, {EPOCHS} epochs; bars: standard deviation between seeds")


STUDY = Study(
    "003",
    "Crossover-SGD",
    "Yeo et al., Figures 6 and 8 to 10. In the place of ResNet-50 on ImageNet: a perceptron on MNIST-1D, momentum "
    "SGD with Goyal's warm-up and a cosine; LARS has nothing to scale there.",
    _settings,
    _report,
    _draw,
    "time efficiency (Fig. 11: gossip 12-14 % above AllReduce) is the cost model's and the measured tables' business"
    " (benchmarks/results); the ablations at 8 and 64 replicas, for time.",
    _spectra,
)
