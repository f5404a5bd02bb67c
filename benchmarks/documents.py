"""Numbers in documents come from files: what stands between two marks is written from what is stored.

``<!-- measured: tuned / nodes-8 / AllReduce -->91.0 ± 1.3<!-- end -->``: a path, and what it stands for. A table of
several lines stands on lines of its own. ``python -m benchmarks documents`` writes all of them; a test fails where a
page says anything else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks import prediction, report
from benchmarks.contenders import BOUNDS, ROWS
from benchmarks.measure import Cell, first_to_reach
from benchmarks.papers import front, tuned
from benchmarks.papers.paired import difference
from benchmarks.papers.studies import STUDIES
from benchmarks.papers.study import Results, known_results
from benchmarks.settings import ALONE, NARROW, OURS, PEERS

_ROWS = {
    "README": ["ddp", "all_reduce_bf16", "periodic", "daso", "diloco_streaming", "hand", "periodic_alone"],
    "comparison": ["ddp", "post_local_hook", "torch_hierarchical", "hand", *OURS, *NARROW, *ALONE, *PEERS[3:]],
}
"""Of the tables of a page."""

CHECKOUT = Path(__file__).resolve().parents[1]
ACCURACY = CHECKOUT / "lightning_hiercomm/planning/predict/accuracy.csv"
"""What ``plan`` knows of accuracy."""
RESULTS = CHECKOUT / "benchmarks" / "results"
PAGES = tuple(
    CHECKOUT / name
    for name in (
        "README.md",
        *(f"docs/{name}.md" for name in ("front", "papers", "choosing", "comparison", "planning", "unequal-machines")),
        *(f"docs/schemes/{name}.md" for name in ("daso", "diloco", "gossip", "periodic", "steps_delay")),
        "benchmarks/results/tuned/README.md",
    )
)
_MARKED = re.compile(r"(<!-- measured: (.+?) -->)(.*?)(<!-- end -->)", re.DOTALL)


def accuracy_table() -> str:
    """Return the contents of :data:`ACCURACY`, from what is stored in ``benchmarks/results/front``."""
    lines = ["nodes,scheme,sync_every,wire_dtype,low,high"]
    lines += [",".join(map(str, row)) for row in front.accuracy_rows(RESULTS / "front")]
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page, with what is stored between its marks."""
    return _MARKED.sub(lambda found: f"{found[1]}{_stands_for(found[2])}{found[4]}", page)


def without_marked(page: str) -> str:
    """What of a page comes from no file."""
    return _MARKED.sub("", page)


def _stands_for(path: str) -> str:
    kind, *parts = path.split(" / ")
    text = _KINDS[kind](*parts)
    return f"\n{text}\n" if "\n" in text else text


def _tuned(arena: str, *contenders: str) -> str:
    """A comparison's table; of one contender its accuracy, of two their difference, or the ratio of their rates."""
    comparison = tuned.COMPARISONS[arena]
    known = tuned.load(comparison, RESULTS / "tuned")
    if not contenders:
        return table_of(comparison, known)
    one, *rest = contenders
    if not rest:
        return known[one].text()
    other, *what = rest
    if what:
        first, second = known[one].peak, known[other].peak
        assert first is not None
        assert second is not None
        return f"{math.sqrt(2) ** (first - second):.2g}"
    return difference(known[one].judged, known[other].judged).text()


def _across(one: str, other: str, contender: str, baseline: str | None = None) -> str:
    """How much better a contender is in one arena than in another, whose seeds are the same.

    With a baseline: how much better it is against the baseline of the one arena than against that of the other.
    """
    found = []
    for arena in (one, other):
        known = tuned.load(tuned.COMPARISONS[arena], RESULTS / "tuned")
        judged = known[contender].judged
        found.append(judged if baseline is None else _less(judged, known[baseline].judged))
    return difference(*found).text()


def _less(judged: Mapping[int, float | None], baseline: Mapping[int, float | None]) -> dict[int, float | None]:
    """By seed; None of one of which either diverged."""
    return {
        seed: None if value is None or (other := baseline[seed]) is None else value - other
        for seed, value in judged.items()
    }


def _diverged(arena: str, contender: str, rate: str) -> str:
    """How many of the runs that tuned a contender at a rate diverged."""
    climb = tuned.load(tuned.COMPARISONS[arena], RESULTS / "tuned")[contender]
    (runs,) = (runs for rung, runs in climb.tuning.items() if f"{tuned.rate_of(rung):.3g}" == rate)
    return f"{sum(accuracy is None for accuracy in runs.values())} of {len(runs)}"


def table_of(comparison: tuned.Comparison, known: dict[str, tuned.Climb]) -> str:
    """Markdown."""
    baseline = comparison.contenders[0].name
    lines = [
        f"| | best rate | of that of {baseline} | accuracy, % | against {baseline}, 95 % |",
        "|---|--:|--:|--:|--:|",
        *("| " + " | ".join(row) + " |" for row in tuned.table(comparison, known)),
    ]
    return "\n".join(lines)


@cache
def _front_rows(setting: str) -> dict[str, front.Row]:
    comparison = front.SETTINGS[setting]
    return {row.way.name: row for row in front.rows(comparison, tuned.load(comparison, RESULTS / "front"))}


def _front(setting: str, *what: str) -> str:
    """Return a setting's table; of one method its difference from all-reduce, its share of bytes, or its time."""
    if not what:
        comparison = front.SETTINGS[setting]
        return front.table(comparison, tuned.load(comparison, RESULTS / "front"))
    method, *rest = what
    row = _front_rows(setting)[method]
    if rest:
        return row.share_text() if rest == ["bytes"] else row.time_text(rest[0])
    assert row.apart is not None
    return row.apart.text()


@cache
def _study(number: str) -> Results:
    return known_results(STUDIES[number], RESULTS / "papers" / f"{number}.json")


def _papers(number: str, *keys: str) -> str:
    """Of one setting its accuracy, of two their difference, or by how much less time the model says that one takes."""
    if keys[-1] == "less time":
        own, other = (_study(number).seconds(key).mean for key in keys[:2])
        return f"{100 * (1 - own / other):.0f} %"
    first, *rest = (_study(number).accuracy(key) for key in keys)
    return first.against(rest[0]) if rest else first.text()


def _model(link: str, delay: str) -> str:
    """How many times as fast as all-reduce the model says that SSD-SGD is."""
    return f"{json.loads((RESULTS / 'papers' / '001.json').read_text())['extra'][link][delay]:.1f}"


@cache
def _cells(setting: str) -> dict[str, Cell]:
    return {cell.title: cell for cell in report.load_one(RESULTS / f"{setting}.json")}


def _speed(setting: str, title: str, what: str) -> str:
    """Of a step: milliseconds, with half their range or without, megabytes, or the ratio to its bound or to another."""
    cell = _cells(setting)[title]
    milliseconds = report.measured(cell)
    if what in ("ms", "ms, range"):
        return milliseconds if what == "ms, range" else milliseconds.split(" ")[0]
    if what == "MB":
        return f"{(cell.bytes_per_step or math.nan) / 1e6:.1f}"
    if what == "bound":
        return f"{cell.ratio:.2f}"
    own, other = cell.step_ms, _cells(setting)[what].step_ms
    assert own is not None
    assert other is not None
    return f"{own / other:.1f}"


def _accuracy(setting: str) -> str:
    """The table of a workload's time to accuracy."""
    stored = json.loads((RESULTS / f"accuracy-{setting}.json").read_text())
    target = stored["target"]
    lines = [
        f"| | last accuracy | seconds | MB sent | seconds to {target:.3f} | MB to {target:.3f} |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row, curve in stored["curves"].items():
        last, there = curve[-1], first_to_reach(curve, target)
        spent = [f"{last['accuracy']:.3f}", f"{last['seconds']:.1f}", f"{last['bytes'] / 1e6:.0f}"]
        reached = [f"{there['seconds']:.1f}", f"{there['bytes'] / 1e6:.0f}"] if there else ["not reached", ""]
        lines.append("| " + " | ".join([ROWS[row].title, *spent, *reached]) + " |")
    return "\n".join(lines)


@cache
def _scaling(what: str, *only: str) -> str:
    """How far bytes are from their formula, of some rows or of all others; or how busy processors are with 8 nodes."""
    settings = report.load(RESULTS, "scaling-")
    cells = [cell for cells in settings for cell in cells if cell.row not in BOUNDS]
    if what == "processors":
        shares = [cell.processor_share for cell in cells if cell.nodes == 8 and cell.processor_share is not None]
        return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"
    sent = [(cell.bytes_per_step, cell.bytes_needed) for cell in cells if (cell.title in only) == (what == "bytes of")]
    above = [abs(bytes_sent / needed - 1) for bytes_sent, needed in sent if bytes_sent and needed]
    return f"{math.ceil(100 * max(above))} %"


def _memory(*only: str) -> str:
    """How many models more than DDP a scheme takes at a peak; without either, all of them as a table."""
    stored = json.loads((RESULTS / "memory.json").read_text())
    rows, model = stored["rows"], stored["model_bytes"]
    baseline = rows.pop("ddp")
    if only:
        name, when = only
        return f"{(rows[name][when] - baseline[when]) / model:+.2f}"
    lines = [f"| scheme | {' | '.join(baseline)} |", "|---|" + "--:|" * len(baseline)]
    for name, peaks in rows.items():
        extra = [f"{(peaks[when] - base) / model:+.2f}" for when, base in baseline.items()]
        lines.append(f"| `{name}` | {' | '.join(extra)} |")
    return "\n".join(lines)


def _sync_every(period: str, how: str) -> str:
    """The loss in the table of that study."""
    rows = (line.strip("| ").split(" | ") for line in (RESULTS / "sync-every.md").read_text().splitlines())
    return next(row[2] for row in rows if row[:2] == [period, how])


def _once(name: str) -> str:
    """A number that was measured a single time, by a run whose own file was not kept: what is known of it is stored."""
    return str(json.loads((RESULTS / "once.json").read_text())[name]["value"])


def _quote(page: str) -> str:
    """The table of a page."""
    cells = report.load_one(RESULTS / "mlp11m-2x2-500mbit.json")
    return report.quotation(cells, _ROWS[page], bounds=page == "comparison").strip()


@cache
def _predictions(probes: str, percent: str) -> str:
    """How many were within so many percent: of the first probe, or of the mean of all; or on settings held out.

    Those of ``held-out-before`` were, until the model's last revision was chosen with them in sight.
    """
    is_held_out = probes.startswith("held-out")
    rows = _predicted(probes if is_held_out else "prediction", only_first=is_held_out or probes == "first")
    return f"{sum(abs(row.ratio - 1) <= float(percent) / 100 for row in rows)} of {len(rows)}"


def _predicted(name: str, only_first: bool) -> list[prediction.Compared]:
    settings = prediction.load(RESULTS / f"{name}.json")
    if only_first:
        settings = [replace(setting, profiles=setting.profiles[:1]) for setting in settings]
    return [row for setting in settings for row in prediction.compare(setting)]


def _held_out() -> str:
    """Predicted from one probe in front, on settings that the model was not revised on."""
    return prediction.table(_predicted("held-out", only_first=True)).rpartition("\n\n")[0]


def _audit() -> str:
    """What was said, what an audit found, and what became of it."""
    rows = json.loads((RESULTS / "tuned" / "audit.json").read_text())["rows"]
    lines = ["| this page said | tuned | what became of it |", "|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


_KINDS: dict[str, Callable[..., str]] = {
    "audit": _audit,
    "tuned": _tuned,
    "across": _across,
    "diverged": _diverged,
    "front": _front,
    "papers": _papers,
    "model": _model,
    "speed": _speed,
    "quote": _quote,
    "accuracy": _accuracy,
    "scaling": _scaling,
    "memory": _memory,
    "sync-every": _sync_every,
    "once": _once,
    "predictions": _predictions,
    "held-out": _held_out,
}
