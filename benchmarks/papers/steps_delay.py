"""001, SSD-SGD: how long a delay, how long a warm-up, which local rule, and how fast?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.papers.asynchronous import asynchronous
from benchmarks.papers.perceptron import EXAMPLES, PERCEPTRON
from benchmarks.papers.pictures import legend, lines, panels, save
from benchmarks.papers.report import table
from benchmarks.papers.sites import SITES
from benchmarks.papers.study import Results, Setting, Study
from benchmarks.predict.cluster import Link
from benchmarks.predict.cost import predict
from benchmarks.simulate.simulation import Experiment, simulate
from lightning_hiercomm.schemes import AllReduce, Scheme, StepsDelay

NODES = 4
EPOCHS = 12
RATES = {"low": 0.1, "high": 0.2, "highest": 0.4}
"""Of the last, a few rows only."""
PLAYED = {"low": 0.1, "high": 0.2}
"""With all rows."""
SHARES = (2, 4)
"""Parts of the learning rate that an asynchronous server gets, which steps once for every node."""
WARM_UP = 120
"""A multiple of every k; the paper's 500 would be most of these runs."""
DELAYS = (1, 2, 3, 4, 5)
WARM_UPS = (0, 60, 120, 240, 480)
RULES = {"GLU": "glu", "DC-ASGD": "dc_asgd", "SGD": "sgd"}
LONGEST = max(DELAYS)
GBITS = (56, 10, 1)

_PAPER_DELAYS = {  # ResNet-20 on CIFAR-10, ResNet-50 in batches of 32 on ImageNet
    "AllReduce": ("92.126", "73.792"),
    1: ("92.204", "73.865"),
    2: ("92.228", "73.810"),
    3: ("92.153", "74.001"),
    4: ("92.148", "74.004"),
    5: ("91.129", "73.745"),
}
_PAPER_RULES = {"GLU": "73.745", "DC-ASGD": "73.369", "SGD": "73.226"}


def _schemes() -> dict[str, Callable[[], Scheme]]:
    made: dict[str, Callable[[], Scheme]] = {"AllReduce": AllReduce}
    for delay in DELAYS:
        made[f"k = {delay}"] = partial(StepsDelay, delay, warmup_steps=WARM_UP)
    for warm_up in WARM_UPS:
        if warm_up != WARM_UP:
            for delay in (1, LONGEST):
                made[f"k = {delay}, warm-up {warm_up}"] = partial(StepsDelay, delay, warmup_steps=warm_up)
    for name, rule in RULES.items():
        if rule != "glu":
            made[f"k = {LONGEST}, {name}"] = partial(StepsDelay, LONGEST, warmup_steps=WARM_UP, local_update=rule)
    return made


def _key(name: str, rate: str) -> str:
    return f"{name}; {rate} learning rate"


def _make(seed: int, make: Callable[[], Scheme], name: str, rate: float) -> Experiment:
    steps = round(EPOCHS * EXAMPLES / (NODES * PERCEPTRON.batch))
    return Experiment(name, make(), NODES, steps, rate, PERCEPTRON.batch, PERCEPTRON, seed=seed)


def _settings() -> list[Setting]:
    site = SITES["001"]
    played = [
        Setting(_key(name, rate), partial(_make, make=make, name=name, rate=RATES[rate]), site, simulate, EPOCHS)
        for rate in RATES
        for name, make in _schemes().items()
        if rate != "highest" or name in ("AllReduce", "k = 1", f"k = {LONGEST}")
    ]
    server_rates = sorted({value / share for value in RATES.values() for share in SHARES})
    servers = [
        Setting(_server(rate), partial(_make, make=AllReduce, name="ASGD", rate=rate), site, asynchronous, EPOCHS)
        for rate in server_rates
    ]
    return [*played, *servers]


def _speeds() -> dict[str, Any]:
    """Steps per second against AllReduce's, by the cost model."""
    site = SITES["001"]
    found: dict[str, Any] = {}
    for gbit in GBITS:
        inter = Link(gbit * 1e9 / 8, site.cluster.inter.latency)
        cluster = replace(site.cluster, nodes=NODES, inter=inter, world=None)
        base = predict(AllReduce(), cluster, site.workload).seconds
        own = {
            f"k = {delay}": base / predict(StepsDelay(delay, warmup_steps=0), cluster, site.workload).seconds
            for delay in DELAYS
        }
        moved = (NODES - 1) / NODES * site.workload.model_bytes
        own["ASGD"] = base / (site.workload.seconds + 2 * moved / inter.bandwidth)
        own["no communication"] = base / site.workload.seconds
        found[str(gbit)] = own
    return found


def _server(rate: float) -> str:
    return f"ASGD at {rate:g}"


def _best_server(results: Results, rate: str) -> str:
    return results.best_of([_server(RATES[rate] / share) for share in SHARES])


def _report(results: Results) -> str:
    words = " and ".join(f"{rate:g}" for rate in RATES.values())
    rows = []
    for name in ["AllReduce", *(f"k = {delay}" for delay in DELAYS), "ASGD"]:
        cells = [name]
        for rate in RATES:
            base = results.accuracy(_key("AllReduce", rate))
            own = results.accuracy(_best_server(results, rate) if name == "ASGD" else _key(name, rate))
            cells += [own.text(), "" if name == "AllReduce" else own.against(base)]
        delay: Any = name if name == "AllReduce" else int(name[-1]) if name != "ASGD" else None
        rows.append([*cells, *_PAPER_DELAYS.get(delay, ("", ""))])
    head = [""]
    for value in RATES.values():
        head += [f"at {value:g}", "against AllReduce"]
    parts = [
        f"**Table 2, the delay k**: {NODES} nodes, warm-up of {WARM_UP} of {_steps()} steps, GLU at the local "
        f"learning rate that fits it, global learning rates {words}, accuracy in %. ASGD at the better of a half and "
        "a quarter of the learning rate, since its server steps once for every node.\n\n"
        + table([*head, "paper: ResNet-20 (SSGD in the first row)", "ResNet-50 (32)"], rows)
    ]
    rows = []
    for name in RULES:
        key = f"k = {LONGEST}" if name == "GLU" else f"k = {LONGEST}, {name}"
        cells = [name]
        for rate in PLAYED:
            own, glu = results.accuracy(_key(key, rate)), results.accuracy(_key(f"k = {LONGEST}", rate))
            cells += [own.text(), "" if name == "GLU" else own.against(glu)]
        rows.append([*cells, _PAPER_RULES[name]])
    head = [part.replace("AllReduce", "GLU") for part in head[: 1 + 2 * len(PLAYED)]]
    parts.append(
        f"**Figure 5, the local rule** at k = {LONGEST}, each at its own local learning rate (4, 1 and 0.25 times the"
        " global one).\n\n" + table([*head, "paper: ResNet-50 (32)"], rows)
    )
    rows = []
    for warm_up in WARM_UPS:
        cells = [str(warm_up)]
        for rate in PLAYED:
            for delay in (1, LONGEST):
                name = f"k = {delay}" if warm_up == WARM_UP else f"k = {delay}, warm-up {warm_up}"
                cells.append(results.accuracy(_key(name, rate)).text())
        rows.append(cells)
    head = [f"k = {delay}, at {value:g}" for value in PLAYED.values() for delay in (1, LONGEST)]
    parts.append(
        "**Figure 4, the warm-up**. The paper (ResNet-20, k = 1; no numbers printed): 100 iterations obviously below"
        " SSGD, 200"
        " slightly, from 300 on as good.\n\n" + table(["warm-up steps", *head], rows, left=0)
    )
    if results.extra:
        columns = [*(f"k = {delay}" for delay in DELAYS), "ASGD", "no communication"]
        rows = [[f"{gbit} Gbit/s", *(f"{results.extra[str(gbit)][name]:.2f}x" for name in columns)] for gbit in GBITS]
        parts.append(
            "**Speed against AllReduce**, by the cost model: ResNet-50, 4 nodes of 4, a step of 100 ms. The paper "
            "compares with MXNet's parameter server, whose links carry more than an all-reduce's do: it finds k = 5 "
            "72.3 % (ResNet-50 in batches of 32), 100.7 % (AlexNet) and 58.7 % (VGG-11) faster on 56 Gbit/s, and "
            "ASGD slower than"
            " that, except for ResNet-50 in batches of 64.\n\n" + table(["link", *columns], rows)
        )
    return "\n\n".join(parts)


def _steps() -> int:
    return round(EPOCHS * EXAMPLES / (NODES * PERCEPTRON.batch))


def _draw(results: Results, path: Path) -> None:
    figure, (delays, warm_ups, rules) = panels(3)
    samples = {
        f"at {value:g}": [results.accuracy(_key(f"k = {delay}", rate)) for delay in DELAYS]
        for rate, value in PLAYED.items()
    }
    lines(delays, DELAYS, samples, ["steps_delay"] * len(PLAYED))
    for rate, style in zip(RATES, (":", "--", "-."), strict=True):
        base = results.accuracy(_key("AllReduce", rate)).mean
        delays.axhline(base, color="black", linestyle=style, linewidth=1, label=f"AllReduce at {RATES[rate]:g}")
    delays.set(
        xlabel="k", ylabel="accuracy, held out, %", title=f"the delay (Table 2), warm-up {WARM_UP}", xticks=DELAYS
    )
    samples = {}
    for delay in (1, LONGEST):
        for rate, value in PLAYED.items():
            names = [f"k = {delay}" if w == WARM_UP else f"k = {delay}, warm-up {w}" for w in WARM_UPS]
            samples[f"k = {delay}, at {value:g}"] = [results.accuracy(_key(name, rate)) for name in names]
    lines(warm_ups, WARM_UPS, samples, ["steps_delay"] * len(samples))
    warm_ups.set(xlabel="steps of warm-up", title="the warm-up (Fig. 4)", xticks=WARM_UPS)
    names = {name: f"k = {LONGEST}" if name == "GLU" else f"k = {LONGEST}, {name}" for name in RULES}
    samples = {
        f"at {value:g}": [results.accuracy(_key(names[name], rate)) for name in RULES] for rate, value in PLAYED.items()
    }
    lines(rules, range(len(RULES)), samples, ["steps_delay"] * len(PLAYED))
    rules.set_xticks(range(len(RULES)), list(RULES))
    rules.set_title(f"the local rule at k = {LONGEST} (Fig. 5)")
    for axis in (delays, warm_ups, rules):
        legend(axis)
    save(
        figure,
        path,
        f"SSD-SGD: {PERCEPTRON.name}, {NODES} nodes, {EPOCHS} epochs; bars: standard deviation of the seeds",
    )


STUDY = Study(
    "001",
    "SSD-SGD",
    "Xu et al., Table 2, Figures 4, 5 and 7. In the place of ResNets on CIFAR and ImageNet: a perceptron on "
    "MNIST-1D, momentum SGD with a short rise and a cosine.",
    _settings,
    _report,
    _draw,
    "speeds with one to four servers (Fig. 6): here every rank is one.",
    _speeds,
)
