"""Runs the compatibility suite and writes its results into the documentation.

``python -m tests.compatibility.matrix`` in a checkout; further arguments go to pytest.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightning_hiercomm.schemes import SCHEMES

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"


class Matrix:
    """Collects the results of the tests that have a feature and a scheme."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self.refused: set[str] = set()
        self.passed: dict[tuple[str, str], bool] = {}
        self._cells: dict[str, tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            marker, call = item.get_closest_marker("feature"), getattr(item, "callspec", None)
            if marker is not None and call is not None:
                self._cells[item.nodeid] = (marker.args[0], call.params["scheme_name"])
                self.notes.setdefault(marker.args[0], marker.kwargs.get("note", ""))
                if marker.kwargs.get("refused", False):
                    self.refused.add(marker.args[0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cell = self._cells.get(report.nodeid)
        if cell is not None and (report.when == "call" or not report.passed):
            self.passed[cell] = self.passed.get(cell, True) and report.passed

    def table(self) -> str:
        """A Markdown table of features by schemes, with footnotes."""
        notes = list(dict.fromkeys(note for note in self.notes.values() if note))
        lines = ["| feature | " + " | ".join(f"`{name}`" for name in SCHEMES) + " |", "|---|" + ":-:|" * len(SCHEMES)]
        for feature, note in self.notes.items():
            signs = {True: "refused" if feature in self.refused else "✓", False: "✗", None: ""}
            cells = [signs[self.passed.get((feature, name))] for name in SCHEMES]
            footnote = f" <sup>{notes.index(note) + 1}</sup>" if note else ""
            lines.append(f"| {feature}{footnote} | " + " | ".join(cells) + " |")
        footnotes = [f"{number}. {note[0].upper()}{note[1:]}." for number, note in enumerate(notes, 1)]
        return "\n".join([*lines, "", *footnotes])


def written(page: str, table: str) -> str:
    """The page with the table between its markers."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table.strip()}\n{END}", page, flags=re.DOTALL)


def main() -> int:
    matrix = Matrix()
    folder = Path(__file__).parent
    arguments = [str(folder), f"--ignore={folder / 'test_matrix.py'}", "--nightly", *sys.argv[1:]]
    status = pytest.main(arguments, plugins=[matrix])
    if matrix.passed:
        PAGE.write_text(written(PAGE.read_text(), matrix.table()))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
