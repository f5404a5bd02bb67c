"""Tables and a picture of what is stored; nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from benchmarks.language.methods import METHODS
from benchmarks.language.model import SIZES
from benchmarks.language.runs import (
    STORED,
    Known,
    Run,
    about,
    is_bracketed,
    load,
    name_of,
    peak,
    rate_of,
    rungs,
    runs_of_all,
)
from benchmarks.palette import COLOURS
from benchmarks.papers.paired import Difference, difference
from benchmarks.papers.report import table
from lightning_hiercomm.planning.plan import BACKWARD

BASELINE = "all_reduce"
_MBIT = (100, 1000, 10_000)


def judged(known: Known, method: str) -> dict[int, float | None]:
    """Return the losses on the judging part at a method's best rate, by seed."""
    best = peak(known, method)
    return {seed: run.judging for (rung, seed), run in _whole(known, method).items() if rung == best}


def _whole(known: Known, method: str) -> dict[tuple[int, int], Run]:
    """Return a method's runs of full length, by rung and seed."""
    mine = ((key, run) for key, run in known.items() if key.method == method)
    return {(key.rung, key.seed): run for key, run in mine if key.seed is not None}


def _sent(known: Known, method: str) -> float:
    """Return the mean bytes per node and step of a method's runs of full length; 0 without one."""
    return fmean([run.sent for run in _whole(known, method).values() if run.points] or [0.0])


def apart(known: Known, method: str) -> Difference:
    """Return how much more a method loses than float32 all-reduce, each at its best rate."""
    return difference(judged(known, method), judged(known, BASELINE))


def accuracy_rows(size: str, nodes: int, methods: Sequence[str | None]) -> Iterator[tuple[str | int | float, ...]]:
    """Yield what ``plan`` quotes: method, nodes, optimizer, steps, unit, mean difference, the ends of its interval."""
    known, about_size = load(size, nodes, STORED), SIZES[size]
    for method, described in METHODS.items():
        found = apart(known, method)
        if described.title in methods and found.pairs >= about_size.seeds:
            ends = (round(value, 3) for value in (found.mean, found.low, found.high))
            yield described.title, nodes, "adamw", about_size.steps, "nats", *ends


def with_results(known: Known) -> list[str]:
    """Return the methods with a run of full length."""
    return [method for method in METHODS if _whole(known, method)]


def share(known: Known, method: str) -> float:
    """Return the bytes of a method as a share of those of float32 all-reduce."""
    baseline = _sent(known, BASELINE)
    return _sent(known, method) / baseline if baseline else 0.0


def status(size: str, nodes: int = 8) -> str:
    """Return how complete the results are, and what they took."""
    known = load(size, nodes, STORED)
    facts, seeds = about(known), SIZES[size].seeds
    finished = [method for method in METHODS if is_bracketed(known, method) and len(judged(known, method)) >= seeds]
    spent = f"{facts['hours']:.1f} processor hours, {facts['cut']} runs were cut short and continued"
    if len(finished) == len(METHODS):
        return f"{facts['runs']} runs, {spent}."
    least = max(runs_of_all(list(METHODS), seeds), facts["runs"])
    return (
        f"**Incomplete: {facts['runs']} of at least {least} runs** ({spent}). {len(finished)} of {len(METHODS)}"
        f" methods have a bracketed learning rate and {seeds} seeds; rows of one run have no interval."
    )


def losses(size: str, nodes: int = 8) -> str:
    """Return a row per method: its bytes, its rate, its loss, and the difference to float32 all-reduce."""
    known = load(size, nodes, STORED)
    rows = []
    for method in with_results(known):
        best, values = peak(known, method), [value for value in judged(known, method).values() if value is not None]
        assert best is not None
        rate = f"{rate_of(best):g}" if is_bracketed(known, method) else f"{rate_of(best):g} (not bracketed)"
        part = share(known, method)
        rows.append(
            [
                METHODS[method].title,
                f"1/{1 / part:.3g}" if part else "",
                rate,
                f"{fmean(values):.3f}" if values else "diverged",
                "" if method == BASELINE else apart(known, method).text(3),
                str(len(values)),
            ]
        )
    head = ["", "bytes, of float32", "best rate", "nats per byte", "against float32 all-reduce, 95 %", "seeds"]
    return table(head, rows)


def ladder(size: str, nodes: int = 8) -> str:
    """Return the losses of the short runs on the tuning part by learning rate."""
    known = load(size, nodes, STORED)
    every = sorted({key.rung for key in known if key.seed is None})
    rows = []
    for method in METHODS:
        if found := rungs(known, method):
            best = peak(known, method)
            cells = ["" if rung not in found else _loss(found[rung], rung == best) for rung in every]
            rows.append([METHODS[method].title, *cells])
    return table(["tuning loss at the rate", *(f"{rate_of(rung):g}" for rung in every)], rows)


def _loss(value: float | None, is_best: bool) -> str:
    text = "diverged" if value is None else f"{value:.3f}"
    return f"**{text}**" if is_best else text


def until_loss(size: str, nodes: int = 8) -> str:
    """Return the megabytes that a node sends until a loss that all-reduce reaches before its end."""
    known = load(size, nodes, STORED)
    curves = {method: _curve(known, method) for method in with_results(known)}
    if len(curves.get(BASELINE, [])) < 2:
        return ""
    target, rows = curves[BASELINE][-3][1], []
    for method, curve in curves.items():
        sent = _sent(known, method)
        step = next((step for step, loss in curve if loss <= target), None)
        times = [f"{1e3 * sent * 8 / (1e6 * rate):.3g}" for rate in _MBIT]
        spent = ["not reached", ""] if step is None else [str(step), f"{sent * step / 1e6:.3g}"]
        rows.append([METHODS[method].title, *spent, *times])
    head = ["", f"steps to {target:.3f}", "MB that a node sends until then"]
    return table([*head, *(f"ms of link per step, {rate:,} Mbit/s" for rate in _MBIT)], rows)


_RATIOS = (1, 4, 8, 12, 16, 24, 32, 64)


def by_ratio(size: str, nodes: int = 8) -> str:
    """Return the modeled time until a loss that float32 all-reduce has half way, by T / c, in steps of one node.

    Gradients hide behind two thirds of a step, averages of parameters do not. A run that was planned to end at that
    loss would reach it sooner, because its learning rate would be lower by then.
    """
    known = load(size, nodes, STORED)
    target = dict(_curve(known, BASELINE))[SIZES[size].steps // 2]
    rows: dict[str, list[float]] = {}
    for method in _simple(known):
        step, part = _step_at(_curve(known, method), target), share(known, method)
        waits = [
            ratio * part - (0 if METHODS[method].family in ("periodic", "diloco") else BACKWARD) for ratio in _RATIOS
        ]
        rows[METHODS[method].title] = [] if step is None else [step * (1 + max(0.0, wait)) for wait in waits]
    least = [min(column) for column in zip(*filter(None, rows.values()), strict=True)]
    cells = {
        title: [f"**{time:.0f}**" if time == low else f"{time:.0f}" for time, low in zip(times, least, strict=True)]
        for title, times in rows.items()
        if times
    }
    head = [f"c until {target:.3f}, at T / c", *map(str, _RATIOS)]
    return table(head, [[title, *cells.get(title, ["never"] * len(_RATIOS))] for title in rows])


def _simple(known: Known) -> list[str]:
    """Return the methods that send equal bytes at every synchronization, and wait for it if it is of parameters."""
    return [method for method in with_results(known) if method not in ("daso", "periodic16", "gossip", "steps_delay")]


def _step_at(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Return the step at which a curve reaches a loss, on straight lines between evaluations."""
    for (before, high), (after, low) in pairwise(curve):
        if low <= target:
            return before + (after - before) * (high - target) / (high - low)
    return None


def _curve(known: Known, method: str) -> list[tuple[int, float]]:
    """Return the judging loss of the first seed at the best rate, by step."""
    run = _whole(known, method).get((peak(known, method) or 0, 0))
    return [] if run is None else [(int(step), judging) for step, _, judging in run.points]


def draw(size: str, path: Path, nodes: int = 8) -> None:
    """Draw the loss against the bytes, on the way and at the end."""
    from benchmarks.papers.pictures import panels, save

    known = load(size, nodes, STORED)
    figure, (by_bytes, at_end) = panels(2, 5.6)
    for method in with_results(known):
        curve = _curve(known, method)
        sent = _sent(known, method)
        if not curve or not sent:
            continue
        look = {"color": COLOURS[METHODS[method].family], "linewidth": 1.3}
        is_tried = "experiment" in METHODS[method].title
        xs = [sent * step / 1e6 for step, _ in curve]
        by_bytes.plot(xs, [loss for _, loss in curve], linestyle=":" if is_tried else "-", **look)
        by_bytes.annotate(_short(method), (xs[-1], curve[-1][1]), (3, 0), textcoords="offset points", fontsize=7)
        found = Difference(0.0, 0.0, 1) if method == BASELINE else apart(known, method)
        half = found.half if found.pairs > 1 else 0.0
        shape = {"marker": "o", "markerfacecolor": "none" if is_tried else look["color"], "capsize": 2}
        at_end.errorbar([share(known, method)], [found.mean], yerr=[half], color=look["color"], **shape)
        at_end.annotate(
            _short(method), (share(known, method), found.mean), (5, 3), textcoords="offset points", fontsize=8
        )
    by_bytes.set(xscale="log", xlabel="MB that a node has sent", ylabel="held-out loss, nats per byte")
    at_end.set(xscale="log", xlabel="bytes, float32 all-reduce = 1", ylabel="nats per byte above float32 all-reduce")
    at_end.axhline(0.0, color="black", linewidth=0.8, linestyle=":")
    seeds = max((len(judged(known, method)) for method in METHODS), default=0)
    words = f"{size}, {nodes} nodes, {SIZES[size].steps} steps, up to {seeds} seeds; bars: 95 %"
    save(figure, path, f"A byte language model: {words}")


def _short(method: str) -> str:
    title = METHODS[method].title.removesuffix(" (experiment)").removeprefix("AllReduce, ").removeprefix("DDP, ")
    return title.split(", warm-up")[0].removesuffix(" of PyTorch")


def write(folder: Path, sizes: Sequence[str] = ("small", "medium", "large")) -> list[Path]:
    """Draw every stored size; return the paths of what was written."""
    written = [folder / f"{size}.png" for size in sizes if load(size, 8, folder)]
    for path in written:
        draw(path.stem, path)
    return written


def synchronizations(size: str, nodes: int = 8) -> str:
    """Return the loss of methods that synchronize rarely by the number of synchronizations."""
    known, steps, rows = load(size, nodes, STORED), SIZES[size].steps, []
    for method in ("periodic4", "diloco16", "diloco64"):
        found, period = apart(known, method), METHODS[method].make(steps).period
        if found.pairs:
            rows.append([METHODS[method].title, str(steps // period), found.text(3)])
    return table(["", "synchronizations of the run", "nats per byte above float32 all-reduce, 95 %"], rows)


_ASSUMED_SPEED = 989e12 * 0.15
"""Floating-point operations of an H100 per second, of which small models reach about 15 %: an assumption."""
_MEMORY_SPEED = 3.35e12 * 0.5
"""Bytes per second, likewise."""


def estimate(size: str, nodes: int = 8) -> str:
    """Return the time that a size would take on an H100, by a model of its arithmetic and of its optimizer."""
    about_size, seeds = SIZES[size], SIZES[size].seeds
    weights = (about_size.flops_per_token / 6.0) - about_size.layers * about_size.length * about_size.width
    tokens = nodes * about_size.batch * about_size.length
    step = tokens * about_size.flops_per_token / _ASSUMED_SPEED + nodes * weights * 80.0 / _MEMORY_SPEED
    methods = len(METHODS)
    hours = step * methods * (seeds * about_size.steps + 3 * about_size.short) / 3600
    return (
        f"{methods} methods, {seeds} seeds, three rates: {1e3 * step:.0f} ms per step of {tokens:,} bytes,"
        f" {step * about_size.steps / 60:.1f} minutes per run, {hours:.1f} hours in all."
    )


def picture(size: str, nodes: int = 8) -> str:
    """Return the picture of a size, if there is one."""
    name = f"{name_of(size, nodes)}.png"
    return f"![Loss against bytes]({name})" if (STORED / name).exists() else "No picture yet."


_PARTS: dict[str, Callable[..., str]] = {
    "synchronizations": synchronizations,
    "estimate": estimate,
    "picture": picture,
    "status": status,
    "losses": losses,
    "ladder": ladder,
    "until": until_loss,
    "by ratio": by_ratio,
}


def passage(size: str, part: str, nodes: str = "8") -> str:
    """Return a part of a page."""
    return _PARTS[part](size, int(nodes))
