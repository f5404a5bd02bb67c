"""Numbers in documents come from files: what stands between two marks is written from what is stored.

``<!-- measured: tuned / nodes-8 / AllReduce -->91.0 ± 1.3<!-- end -->``: a path, and what it stands for. A table of
several lines stands on lines of its own. ``python -m benchmarks documents`` writes all of them; a test fails where a
page says anything else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import prediction, report
from benchmarks.measure import Cell
from benchmarks.papers import tuned
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
RESULTS = CHECKOUT / "benchmarks" / "results"
PAGES = tuple(
    CHECKOUT / name
    for name in (
        "README.md",
        *(f"docs/{name}.md" for name in ("papers", "choosing", "comparison", "planning", "unequal-machines")),
        *(f"docs/schemes/{name}.md" for name in ("daso", "diloco", "gossip", "periodic", "steps_delay")),
        "benchmarks/results/tuned/README.md",
    )
)
_MARKED = re.compile(r"(<!-- measured: (.+?) -->)(.*?)(<!-- end -->)", re.DOTALL)


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
def _study(number: str) -> Results:
    return known_results(STUDIES[number], RESULTS / "papers" / f"{number}.json")


def _papers(number: str, *keys: str) -> str:
    """Of one setting its accuracy, of two their difference."""
    first, *rest = (_study(number).accuracy(key) for key in keys)
    return first.against(rest[0]) if rest else first.text()


@cache
def _cells(setting: str) -> dict[str, Cell]:
    return {cell.title: cell for cell in report.load_one(RESULTS / f"{setting}.json")}


def _speed(setting: str, title: str, what: str) -> str:
    """Milliseconds of a step, or how many times as fast as DDP."""
    cell = _cells(setting)[title]
    if what == "ms":
        return report.measured(cell).split(" ")[0]
    ddp, own = _cells(setting)["Lightning DDPStrategy"].step_ms, cell.step_ms
    assert ddp is not None
    assert own is not None
    return f"{ddp / own:.2f}x"


def _quote(page: str) -> str:
    """The table of a page."""
    cells = report.load_one(RESULTS / "mlp11m-2x2-500mbit.json")
    return report.quotation(cells, _ROWS[page], bounds=page == "comparison").strip()


@cache
def _predictions(probes: str, percent: str) -> str:
    """How many were within so many percent: of the first probe, or of the mean of all."""
    rows: list[Any] = []
    for setting in prediction.load(RESULTS / "prediction.json"):
        if probes == "first":
            setting = replace(setting, profiles=setting.profiles[:1])
        rows += prediction.compare(setting)
    return f"{sum(abs(row.ratio - 1) <= float(percent) / 100 for row in rows)} of {len(rows)}"


def _audit() -> str:
    """What was said, what an audit found, and what became of it."""
    rows = json.loads((RESULTS / "tuned" / "audit.json").read_text())["rows"]
    lines = ["| this page said | tuned | what became of it |", "|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


_KINDS: dict[str, Callable[..., str]] = {
    "audit": _audit,
    "tuned": _tuned,
    "papers": _papers,
    "speed": _speed,
    "quote": _quote,
    "predictions": _predictions,
}
