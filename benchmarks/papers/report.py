"""Markdown of what the studies found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.papers.study import Results, Study

PREFACE = """# The papers' claims, simulated

`python -m benchmarks papers` (one of them: `python -m benchmarks papers 003`). The replicas are threads of one process
and run the schemes' own code, bit for bit what processes compute; seconds are those of a virtual clock that goes by
the cost model of `benchmarks.predict` on the paper's cluster, not of this machine. The tasks are small enough
for two processor cores, so **accuracies are not the papers' accuracies**: what can be compared is which method is
higher at one learning rate. That is not which is better: [where both sides are tuned](../tuned/README.md) most of it
turns out to be how large a rate a method stands. Replicas draw from all examples, with replacement; the 1,000 held-out
ones chose the rates and judge them.

Every number is the mean over the seeds ± their standard deviation. Differences are of runs with the same seed, which
share initial values and batches, with their 95 % interval; **bold** where 0 lies outside. An interval that holds 0
shows no difference, and no equality either.
"""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first ``left`` columns are words, the others numbers.

    Rows and columns without any number are left out: what was not played yet.
    """
    known = [list(row) for row in rows if any(row[left:])]
    kept = [index for index in range(len(columns)) if index < max(1, left) or any(row[index] for row in known)]
    rule = ["---" if index < left else "--:" for index in range(len(columns))]
    lines = [[line[index] for index in kept] for line in [list(columns), rule, *known]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def section(study: Study, results: Results) -> str:
    """What one study has to say."""
    runs = [run for by_seed in results.runs.values() for run in by_seed.values()]
    minutes = sum(run.get("took", 0.0) for run in runs) / 60
    parts = [
        f"## {study.number}: {study.title}",
        f"{study.source} {len(runs)} runs of up to {results.seeds} seeds, {minutes:.0f} minutes of training in all.",
        study.report(results),
        f"![{study.title}]({study.number}.png)",
    ]
    if study.left_out:
        parts.append(f"Left out: {study.left_out}")
    return "\n\n".join(parts) + "\n"


def write_readme(folder: Path, sections: Iterable[str]) -> Path:
    """All sections, in order."""
    path = folder / "README.md"
    path.write_text("\n".join([PREFACE, *sections]))
    return path
