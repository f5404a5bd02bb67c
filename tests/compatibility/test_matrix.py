"""The documentation's matrix is that of this suite."""

from __future__ import annotations

import ast
from pathlib import Path

from compatibility.matrix import BEGIN, END, PAGE

from lightning_hiercomm.schemes import SCHEMES


def rows():
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line.strip("| ").split("|") for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]


def test_every_scheme_has_a_column():
    assert rows()[0] == ["feature", *(f"`{name}`" for name in SCHEMES)]


def test_every_feature_has_a_row_and_nothing_failed():
    calls = [
        node
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "feature"
    ]
    features = {call.args[0].value for call in calls}
    table = {cells[0].partition(" <sup>")[0]: cells[1:] for cells in rows()[2:]}
    assert set(table) == features
    assert set().union(*table.values()) == {"✓", "refused"}
