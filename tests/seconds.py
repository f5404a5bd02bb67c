"""Where the seconds of the tests go: ``pytest --junitxml=seconds.xml ...`` and ``python -m tests.seconds seconds.xml``.

Prints tables by kind, file and shared fixture, and the longest tests, as Markdown; and tests that took more than 5 s on
their own without a marker ``long("why")``. Processor seconds include those of forked ranks and of programs that were
waited for, but not of what a fork server started. Where pytest runs without workers (and nothing beside) they are those
of the whole machine, which tells of these, too.
"""

from __future__ import annotations

import argparse
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LAUNCHES = ("test_launching", "test_faults", "test_soak", "test_restarts", "test_clusters", "test_rendezvous")
LONG = 5.0
"""Seconds after which a test is to say why."""
FITS = ("compatibility", "model_parallel", "trainer", "run", "checkpoints", "packages", "test_training")


@dataclass(frozen=True)
class Test:
    """One test, with the seconds of its fixtures.

    Attributes:
        fixtures: Wall and processor seconds, and names, of shared ones.
        reason: Why it takes long.
    """

    file: str
    name: str
    wall: float
    processor: float
    fixtures: tuple[tuple[float, float, str], ...]
    reason: str = ""

    @property
    def own(self) -> float:
        """Wall seconds without shared fixtures."""
        return self.wall - sum(wall for wall, _, _ in self.fixtures)

    @property
    def kind(self) -> str:
        """What its time goes to."""
        parts = self.file.split("/")
        if parts[0] in ("docs", "examples"):
            return "documentation and examples"
        if parts[-1] in LAUNCHES:
            return "launches"
        if {*parts} & {*FITS}:
            return "fits on forked ranks"
        return "threads and single processes"


def read(path: Path) -> list[Test]:
    """All tests of a JUnit XML file."""
    tests = []
    for case in ElementTree.parse(path).iter("testcase"):
        properties = [(each.get("name"), each.get("value", "")) for each in case.iter("property")]
        fixtures = [value.split(" ", 2) for name, value in properties if name == "fixture"]
        tests.append(
            Test(
                file=re.sub(r"^tests\.", "", case.get("classname", "")).replace(".", "/"),
                name=case.get("name", ""),
                wall=float(case.get("time", 0)),
                processor=sum(float(value) for name, value in properties if name == "processor"),
                fixtures=tuple((float(wall), float(processor), name) for wall, processor, name in fixtures),
                reason="".join(value for name, value in properties if name == "long"),
            )
        )
    return tests


def table(head: str, rows: Iterable[tuple[str, int, float, float]], longest: int = 0) -> str:
    """Markdown: the rows with most seconds first."""
    lines = [f"| {head} | tests | seconds | of the processor |", "|---|--:|--:|--:|"]
    ordered = sorted(rows, key=lambda row: max(row[2:]), reverse=True)
    for name, number, wall, processor in ordered[: longest or None]:
        lines.append(f"| {name} | {number} | {wall:.0f} | {processor:.0f} |")
    return "\n".join(lines)


def grouped(tests: Iterable[Test], attribute: str) -> list[tuple[str, int, float, float]]:
    """Sums by an attribute."""
    groups: dict[str, list[Test]] = defaultdict(list)
    for test in tests:
        groups[getattr(test, attribute)].append(test)
    return [(name, len(own), sum(t.wall for t in own), sum(t.processor for t in own)) for name, own in groups.items()]


def report(tests: list[Test], longest: int) -> str:
    """All tables."""
    fixtures = [(f"{name} ({test.file})", 1, wall, own) for test in tests for wall, own, name in test.fixtures]
    single = [(f"{test.file}: {test.name}", 1, test.wall, test.processor) for test in tests]
    everything = ("all", len(tests), sum(test.wall for test in tests), sum(test.processor for test in tests))
    unexplained = [
        f"- {test.file}: {test.name}: {test.own:.0f} s" for test in tests if test.own > LONG and not test.reason
    ]
    parts = [
        table("kind", [*grouped(tests, "kind"), everything]),
        table("file", grouped(tests, "file"), longest),
        table("shared fixture", fixtures, longest),
        table("test", single, longest),
        "\n".join([f"More than {LONG:.0f} s on its own, and does not say why:", *(unexplained or ["- none"])]),
    ]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("junit", type=Path)
    parser.add_argument("--longest", type=int, default=20)
    arguments = parser.parse_args()
    print(report(read(arguments.junit), arguments.longest))


if __name__ == "__main__":
    main()
