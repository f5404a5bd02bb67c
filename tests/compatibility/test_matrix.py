"""The documentation's matrix is that of this suite."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from compatibility.matrix import BEGIN, END, PAGE


def results() -> dict[str, str]:
    """Return the page's result of each feature."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = re.findall(r"^\| (.+?) \| (.*?) \|.*\|$", table, re.MULTILINE)
    return dict.fromkeys(re.findall(r"^- (.+)$", table, re.MULTILINE), "trained") | dict(rows[1:])


def test_every_feature_is_listed_and_no_scheme_fails():
    calls = [
        node
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("feature", "pytest.mark.feature")
    ]
    listed = results()
    assert set(listed) == {call.args[0].value for call in calls}
    assert set(listed.values()) == {"trained", "refused"}
