"""The documentation lists the features that this suite tests with every scheme."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"


def test_the_page_lists_every_feature_that_is_tested_and_no_other():
    table = PAGE.read_text().partition("<!-- matrix: begin -->")[2].partition("<!-- matrix: end -->")[0]
    rows = re.findall(r"^\| (.+?) \| (trained|refused) \|.*\|$", table, re.MULTILINE)
    calls = [
        node
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("feature", "pytest.mark.feature")
    ]
    features = {call.args[0].value for call in calls}
    assert features == {*re.findall(r"^- (.+)$", table, re.MULTILINE), *(name for name, _ in rows)}
    refused = {call.args[0].value for call in calls if any(word.arg == "refused" for word in call.keywords)}
    assert refused == {name for name, result in rows if result == "refused"}
