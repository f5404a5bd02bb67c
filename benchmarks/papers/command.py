"""``python -m benchmarks papers``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers.report import section, write_readme
from benchmarks.papers.studies import STUDIES, play
from benchmarks.papers.study import collect, known_results
from benchmarks.report import about_this_run


def papers(numbers: Sequence[str], seeds: int, processes: int, out: Path, stored: bool) -> str | None:
    """Do the command; returns what is wrong with its arguments."""
    unknown = [number for number in numbers if number not in STUDIES]
    if unknown:
        return f"there is no study {', '.join(unknown)}: choose from {', '.join(STUDIES)}"
    for number in () if stored else numbers or STUDIES:
        study = STUDIES[number]
        print(f"{number}: {study.title}, {len(study.by_key)} settings of {seeds} seeds", file=sys.stderr, flush=True)
        about = about_this_run(shlex.join(sys.argv), "simulated")
        collect(study, out / f"{number}.json", seeds, processes, about, play)
    sections = []
    for number, study in STUDIES.items():
        path = out / f"{number}.json"
        if path.exists():
            results = known_results(study, path)
            if not results.seeds:
                return f"{path} has no run of the settings of today: play them first, without --stored"
            study.draw(results, path.with_suffix(".png"))
            sections.append(section(study, results))
            if number in numbers or not numbers:
                print(sections[-1])
    print(write_readme(out, sections) if sections else f"nothing is stored in {out}")
    return None
