"""Write code, outputs, numbers and tables into the documentation: ``python -m benchmarks documents``.

Pages are complete as they are stored, so any viewer of Markdown shows them. What comes from another file is between two
comments, ``<!-- generated: PATH -->`` and ``<!-- end -->``. A path such as ``tuned / nodes-8 / AllReduce`` begins with
one of `_KINDS`. A test fails where a page differs from what this program writes.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import prediction, report
from benchmarks.contenders import ROWS
from benchmarks.language import report as language_report
from benchmarks.measure import Cell, first_to_reach
from benchmarks.papers import front, tuned
from benchmarks.papers.paired import difference
from benchmarks.papers.studies import STUDIES
from benchmarks.papers.study import Results, known_results
from benchmarks.passages import MEASURED, PASSAGES
from benchmarks.reference import reference
from benchmarks.settings import ALONE, NARROW, OURS, PEERS
from lightning_hiercomm.__main__ import main
from lightning_hiercomm.planning.plan import RULE, Cluster, recommended, rows_of
from lightning_hiercomm.planning.plan import report as plan_of
from lightning_hiercomm.planning.quantities import shown_number

_ROWS = {
    "README": ["ddp", "ddp_bf16_hook", "all_reduce_bf16", "all_reduce_int8", "all_reduce_int4", "periodic", "diloco"],
    "comparison": ["ddp", "post_local_hook", "torch_hierarchical", "hand", *OURS, *NARROW, *ALONE, *PEERS[3:]],
}
"""Of the tables of a page."""

CHECKOUT = Path(__file__).resolve().parents[1]
ACCURACY = CHECKOUT / "lightning_hiercomm/planning/accuracy.csv"
"""The accuracy that ``plan`` quotes."""
RESULTS = CHECKOUT / "benchmarks" / "results"
SITE = tuple(sorted(page for page in (CHECKOUT / "docs").rglob("*.md") if "_build" not in page.parts))
"""The pages of the documentation."""
PAGES = (CHECKOUT / "README.md", *(RESULTS / part / "README.md" for part in ("tuned", "language", "gpu")), *SITE)
"""Pages with generated parts between comments."""
_MARKED = re.compile(r"(<!-- generated: (.+?) -->)(.*?)(<!-- end -->)", re.DOTALL)


def accuracy_table() -> str:
    """Return the contents of :data:`ACCURACY`: the language model first, which ``plan`` prefers."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("method", "nodes", "optimizer", "steps", "unit", "mean", "low", "high"))
    for nodes in (2, 8):
        lines.writerows(language_report.accuracy_rows("small", nodes, [choice.measured for choice in RULE]))
    lines.writerows(front.accuracy_rows(RESULTS / "front"))
    return text.getvalue()


def written(page: str) -> str:
    """Return the page with its generated parts."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{_value(found[2])}\n{found[4]}", page)


def without_generated(page: str) -> str:
    """Return the page without its generated parts."""
    return _MARKED.sub("", page)


def _value(path: str) -> str:
    kind, *parts = path.split(" / ")
    return _KINDS[kind](*parts)


_LANGUAGES = {".py": "python", ".txt": "text", ".yaml": "yaml"}


def _file(path: str, start: str = "", end: str = "") -> str:
    """Return a file as a block of code: from the first line that contains `start` to before the next with `end`."""
    lines = (CHECKOUT / path).read_text().rstrip().splitlines()
    first = next(index for index, line in enumerate(lines) if start in line)
    rest = lines[first:]
    if end:
        rest = rest[: next(index for index, line in enumerate(rest) if end in line)]
    code = "\n".join(rest).rstrip()
    return f"```{_LANGUAGES[Path(path).suffix]}\n{code}\n```"


def _help(command: str) -> str:
    """Return the help of a command."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            main([command, "--help"])
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before
    return f"```text\n{printed.getvalue()}```"


def _passage(name: str) -> str:
    """Return a passage with its numbers."""
    return re.sub(r"\{(\w+)\}", lambda found: _value(MEASURED[found[1]]), PASSAGES[name])


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
    """Return the differences by seed; None where either run diverged."""
    return {
        seed: None if value is None or (other := baseline[seed]) is None else value - other
        for seed, value in judged.items()
    }


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


_SHOWN = (
    *(f"AllReduce{wire}" for wire in ("", ", bfloat16", ", int8", ", int4", ", sparse2")),
    *(f"PeriodicAveraging({period}), {wire}" for period in (2, 4) for wire in ("int4", "sparse2")),
    "PeriodicAveraging(16), int4",
    *("DASO(4, 1), delta, int4", "DiLoCo(16), int4", "Gossip, int4", "StepsDelay(4), warm-up of 0.8 of the run"),
)
"""Methods in the short tables of the site."""


def _front_short(setting: str) -> str:
    """Return the rows of `_SHOWN` that a setting has, without learning rates."""
    times = " | ".join(f"time to target, {at}" for at in front.RATES)
    lines = [
        f"| | bytes, of float32 | against float32 all-reduce, 95 % | {times} |",
        "|---|" + "--:|" * (2 + len(front.RATES)),
    ]
    for name, row in _front_rows(setting).items():
        if name in _SHOWN:
            apart = "" if row.apart is None else row.apart.text()
            lines.append("| " + " | ".join([name, row.share_text(), apart, *map(row.time_text, front.RATES)]) + " |")
    return "\n".join(lines)


_ADVICE = {
    "2-adamw-short-cnn": "2 nodes, AdamW",
    "8-adamw-short-cnn": "8 nodes, AdamW",
    "8-sgd-short-cnn": "8 nodes, momentum SGD",
    "8-adamw-short-characters": "8 nodes, AdamW, characters",
    "8-adamw-long-cnn": "8 nodes, AdamW, 4 times as long",
}


_ADVISED = tuple(
    name for name in _SHOWN if name.startswith(("AllReduce, ", "PeriodicAveraging(2)", "PeriodicAveraging(4), sparse2"))
)


def _advice() -> str:
    """Return what methods cost in accuracy, by setting; the tables of each setting have more of them."""
    return _costs((*_ADVISED, "DiLoCo(16), int4"), _ADVICE)


def _costs(methods: Sequence[str], settings: Mapping[str, str]) -> str:
    every = {setting: _front_rows(setting) for setting in settings}
    lines = [
        f"| | bytes on 8 nodes, of float32 | {' | '.join(settings.values())} |",
        "|---|" + "--:|" * (1 + len(settings)),
    ]
    for name in methods:
        rows = [rows[name] for rows in every.values()]
        cells = ["" if row.apart is None else row.apart.text() for row in rows]
        lines.append("| " + " | ".join([name, every["8-adamw-short-cnn"][name].share_text(), *cells]) + " |")
    return "\n".join(lines)


_OF_README = {
    "AllReduce, int4": "int4",
    "AllReduce, sparse2": "sparse2",
    "PeriodicAveraging(4)": "periodic4",
    "DiLoCo(16)": "diloco16",
}
"""Methods of the README, by their names in the two benchmarks."""


def _accuracy_of_readme() -> str:
    """Return what methods cost in a language model and on a small task."""
    known = language_report.load("small", 8, language_report.STORED)
    small = [_front_rows(name) for name in ("8-adamw-short-cnn", "8-adamw-long-cnn")]
    lines = [
        "| | bytes, of float32 | language model: nats per byte | CNN: points of accuracy | 4 times as long |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, method in _OF_README.items():
        lost = language_report.apart(known, method)
        cells = [
            lost.text(3) if lost.pairs else "",
            *("" if (apart := rows[name].apart) is None else apart.text() for rows in small),
        ]
        lines.append("| " + " | ".join([name, small[0][name].share_text(), *cells]) + " |")
    return "\n".join(lines)


_CLUSTERS = (
    (25.6, 4, 8, 10, 0.12),
    (25.6, 2, 4, 1, 0.12),
    (125, 2, 8, 1, 0.3),
    (1300, 8, 8, 10, 0.8),
    (125, 8, 8, 1, 0.3),
    (1300, 16, 8, 0.1, 0.8),
    (1300, 2, 8, 0.01, 0.8),
)
"""Million parameters, nodes, GPUs each, Gbit/s, seconds of a step."""


def _clusters() -> str:
    """Return what ``plan`` recommends on example clusters."""
    lines = [
        "| parameters, cluster, c | T / c | write `HierarchicalStrategy` of | DDP | one node | against float32 |",
        "|---|--:|---|--:|--:|---|",
    ]
    for millions, nodes, ranks, gbits, seconds in _CLUSTERS:
        cluster = Cluster(nodes, 1e9 * gbits / 8, 50e-6, 1e6 * millions, seconds, ranks)
        rows = rows_of(cluster)
        best = recommended(cluster, rows)
        shown = f"{millions:,} M, {nodes} nodes of {ranks} GPUs, {gbits} Gbit/s, {seconds} s"
        cells = [f"`{best.choice.arguments}`", f"{shown_number(rows[0].seconds / best.seconds)}x"]
        cells += [f"{shown_number(best.speed)}x", str(best.accuracy)]
        if best.speed < 1:
            cells = ["one node alone", f"{shown_number(rows[0].seconds / seconds / nodes)}x", "1x", ""]
        lines.append("| " + " | ".join([shown, shown_number(cluster.ratio), *cells]) + " |")
    return "\n".join(lines)


_ALONE = RULE[-1].period * 8
"""A step of M nodes by the last row takes c + T / 800, and M c if it is as slow as one node alone."""


def _rule() -> str:
    """Return the rule of ``plan``."""
    lines = ["| T / c | write `HierarchicalStrategy` of | why |", "|---|---|---|"]
    for choice in RULE:
        holds = f"below {choice.below:g}" if choice is not RULE[-1] else f"below {_ALONE:g} (M - 1)"
        holds += ", with 2 nodes and AdamW" if choice.only_where_kept else ""
        arguments = f"instead `{choice.arguments}`" if choice.is_ddp else f"`{choice.arguments}`"
        lines.append(f"| {holds} | {arguments} | {choice.why} |")
    lines.append("| above | nothing: train on one node alone | It is faster than M nodes |")
    return "\n".join(lines)


def _plan() -> str:
    """Return what ``plan`` prints for the first example cluster."""
    millions, nodes, ranks, gbits, seconds = _CLUSTERS[0]
    return f"```text\n{plan_of(Cluster(nodes, 1e9 * gbits / 8, 50e-6, 1e6 * millions, seconds, ranks))}\n```"


_RATES = (
    "PeriodicAveraging(4)",
    "DASO(4), a whole run",
    "Crossover-SGD, flat",
    "StepsDelay(4), warm-up of half the run",
)


def _rates() -> str:
    """Return the best learning rates of methods, as factors of all-reduce's."""
    lines = ["| best learning rate, as a factor of all-reduce's | on 8 nodes | on 32 nodes |", "|---|--:|--:|"]
    for method in _RATES:
        factors = (_tuned(arena, method, "AllReduce", "rate") for arena in ("nodes-8", "nodes-32"))
        lines.append(f"| {method} | {' | '.join(factors)} |")
    return "\n".join(lines)


@cache
def _study(number: str) -> Results:
    return known_results(STUDIES[number], RESULTS / "papers" / f"{number}.json")


def _papers(number: str, *keys: str) -> str:
    """Of one setting its accuracy, of two their difference, or the predicted saving of time."""
    if keys[-1] == "less time":
        own, other = (_study(number).seconds(key).mean for key in keys[:2])
        return f"{100 * (1 - own / other):.0f} %"
    first, *rest = (_study(number).accuracy(key) for key in keys)
    return first.against(rest[0]) if rest else first.text()


def _model(link: str, delay: str) -> str:
    """Return the predicted speed-up of SSD-SGD over all-reduce."""
    return f"{json.loads((RESULTS / 'papers' / '001.json').read_text())['extra'][link][delay]:.1f}"


@cache
def _cells(setting: str) -> dict[str, Cell]:
    return {cell.title: cell for cell in report.load_one(RESULTS / f"{setting}.json")}


def _speed(setting: str, title: str, other: str = "") -> str:
    """Return the milliseconds of a step, or their ratio to those of another row."""
    cell = _cells(setting)[title]
    if not other:
        return report.measured(cell).split(" ")[0]
    own, others = cell.step_ms, _cells(setting)[other].step_ms
    assert own is not None
    assert others is not None
    return f"{own / others:.1f}"


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


def _memory() -> str:
    """Return how many models more than DDP a scheme takes at a peak."""
    stored = json.loads((RESULTS / "memory.json").read_text())
    rows, model = stored["rows"], stored["model_bytes"]
    baseline = rows.pop("ddp")
    lines = [f"| scheme | {' | '.join(baseline)} |", "|---|" + "--:|" * len(baseline)]
    for name, peaks in rows.items():
        extra = [f"{(peaks[when] - base) / model:+.2f}" for when, base in baseline.items()]
        lines.append(f"| `{name}` | {' | '.join(extra)} |")
    return "\n".join(lines)


def _sooner(setting: str, baseline: str = "ddp") -> str:
    """Return the seconds until a target accuracy on a real link, and the ratio to those of another row."""
    stored = json.loads((RESULTS / "compressed" / f"accuracy-{setting}.json").read_text())
    return report.sooner_table(stored["runs"], stored["target"], baseline).strip()


def _sooner_to_loss(setting: str) -> str:
    """Return the seconds until the loss that DDP has after 300 steps, on a real link."""
    stored = json.loads((RESULTS / "language" / f"accuracy-{setting}.json").read_text())
    return report.sooner_to_loss(stored["runs"], 300).strip()


def _quote(page: str) -> str:
    """The table of a page."""
    cells = report.load_one(RESULTS / "mlp11m-2x2-500mbit.json")
    return report.quotation(cells, _ROWS[page], bounds=page == "comparison").strip()


def _gpu_rows() -> dict[str, dict[str, Any]]:
    """Return what was measured between two processes on one GPU, by row."""
    stored = json.loads((RESULTS / "gpu" / "two-nodes.json").read_text())["rows"]
    return {row["row"]: row for row in stored}


def _on_gpu() -> str:
    """Return the seconds of a step over nccl, and those of its bytes alone."""
    lines = ["| | 1 Gbit/s | bytes | 10 Gbit/s | bytes |", "|---|--:|--:|--:|--:|"]
    for row in _gpu_rows().values():
        cells = [row[kind][rate] for rate in ("1000", "10000") for kind in ("seconds", "seconds_of_bytes")]
        lines.append(
            "| " + " | ".join([row["title"], *("" if cell is None else f"{cell:.3g}" for cell in cells)]) + " |"
        )
    return "\n".join(lines)


def _times_of_readme() -> str:
    """Return the times of steps on CPUs, and beside them those on a GPU."""
    cells = {cell.row: cell for cell in report.load_one(RESULTS / "mlp11m-2x2-500mbit.json")}
    on_gpu, ddp = _gpu_rows(), cells["ddp"].step_ms
    lines = [
        "| | CPUs, 500 Mbit/s: ms | against DDP | a GPU, 1 Gbit/s: s | against DDP | 10 Gbit/s: s | against DDP |",
        "|---|" + "--:|" * 6,
    ]
    for row in _ROWS["README"]:
        cell = cells.get(row)
        texts = ["", ""]
        if cell is not None and cell.step_ms and ddp:
            texts = [report.measured(cell), f"{ddp / cell.step_ms:.2f}x"]
        for rate in ("1000", "10000"):
            seconds = on_gpu[row]["seconds"][rate] if row in on_gpu else None
            baseline = on_gpu["ddp"]["seconds"][rate]
            texts += ["", ""] if seconds is None else [f"{seconds:.3g}", f"{baseline / seconds:.2f}x"]
        lines.append("| " + " | ".join([ROWS[row].title.split(" registered")[0], *texts]) + " |")
    return "\n".join(lines)


def _predictions(*what: str) -> str:
    """Return a table of modeled and measured steps of the larger model, or how many of all differ by some percent."""
    rows = list(prediction.compare(RESULTS))
    if not what:
        return prediction.table([row for row in rows if row.cell.workload == "mlp11m"])
    return f"{sum(abs(row.ratio - 1) <= float(what[0]) / 100 for row in rows)} of {len(rows)}"


def _elastic() -> str:
    """Return how nodes under faults did, ours and torchft's."""
    lines = [
        "| | faults | survivors waited: median, longest | steps kept by the run | by all nodes, restarts included |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, title in (("faults", "`DiLoCo` with `elastic=`"), ("torchft", "torchft's own DiLoCo")):
        stored = json.loads((RESULTS / "elastic" / f"{name}-30-minutes.json").read_text())
        waits = [fault["survivors_waited"] or 0.0 for fault in stored["faults"]]
        cells = [title, str(len(waits)), f"{statistics.median(waits):.2f} s, {max(waits):.1f} s"]
        kept = (stored["kept_waits_alone"], stored["kept_with_restarts"])
        lines.append("| " + " | ".join([*cells, *(f"{100 * share:.1f} %" for share in kept)]) + " |")
    return "\n".join(lines)


def _unequal_speeds() -> str:
    """Return the table of `benchmarks.studies.unequal_speeds`, from its stored runs."""
    from benchmarks.studies.unequal_speeds import table  # needs scikit-learn

    return table(json.loads((RESULTS / "unequal-speeds.json").read_text()))


_KINDS: dict[str, Callable[..., str]] = {
    "tuned": _tuned,
    "across": _across,
    "front in short": _front_short,
    "advice": _advice,
    "accuracy of README": _accuracy_of_readme,
    "clusters": _clusters,
    "rates": _rates,
    "papers": _papers,
    "model": _model,
    "speed": _speed,
    "quote": _quote,
    "sooner": _sooner,
    "sooner to loss": _sooner_to_loss,
    "accuracy": _accuracy,
    "on gpu": _on_gpu,
    "times of README": _times_of_readme,
    "memory": _memory,
    "predictions": _predictions,
    "rule": _rule,
    "plan": _plan,
    "elastic": _elastic,
    "file": _file,
    "help": _help,
    "language": language_report.passage,
    "passage": _passage,
    "unequal_speeds": _unequal_speeds,
    "reference": reference,
}
