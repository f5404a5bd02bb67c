"""Runs the compatibility suite and writes its results into the documentation.

``python -m tests.compatibility.matrix`` in a checkout; further arguments go to pytest.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightning_hiercomm.schemes import SCHEMES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
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
        """Return the features that all schemes train, and a Markdown table of those with notes or other results."""
        plain, rows = [], []
        for feature, note in self.notes.items():
            results = [self.passed.get((feature, name)) for name in SCHEMES]
            word = "refused" if feature in self.refused else "trained"
            if all(results) and word == "trained" and not note:
                plain.append(feature)
                continue
            signs = {True: word, False: "fails", None: "not run"}
            by_sign: dict[str, list[str]] = {}
            for name, result in zip(SCHEMES, results, strict=True):
                by_sign.setdefault(signs[result], []).append(f"`{name}`")
            cells = [sign if len(by_sign) == 1 else f"{sign}: {', '.join(names)}" for sign, names in by_sign.items()]
            rows.append(f"| {feature} | {'; '.join(cells)} | {note[:1].upper()}{note[1:]} |")
        trained = "\n".join(f"- {feature}" for feature in plain)
        return "\n".join([trained, "", "| feature | by all schemes | note |", "|---|---|---|", *rows])


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
