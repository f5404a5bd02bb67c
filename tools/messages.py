"""List every error, warning and log line of the package: ``python tools/messages.py``.

Writes ``tests/docs/messages.txt``, one message a line, so that a reviewer reads all of them in five minutes.
``tests/docs/test_messages.py`` fails where the file differs from the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = CHECKOUT / "lightning_hiercomm"
TABLE = CHECKOUT / "tests" / "docs" / "messages.txt"
LOGS = {"debug", "info", "warning", "error", "exception"}
WARNINGS = {"warn", "rank_zero_warn", "rank_zero_deprecation"}


def messages(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of every message of a module, in the order of its lines."""
    yield from _messages(ast.parse(path.read_text()), "text")


def _messages(node: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if is_docstring or (isinstance(node, ast.keyword) and node.arg in ("help", "description")):
        return
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
        text = " ".join(_text(node).split())
        words = re.sub(r"\{[^{}]*\}", "", text).split()
        if sum(bool(re.search("[A-Za-z]{2}", word)) for word in words) > 3:
            yield kind, text
            return
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        kind = ast.unparse(node.exc.func).rpartition(".")[2]
    elif isinstance(node, ast.Call):
        kind = _kind_of_call(node, kind)
    for child in ast.iter_child_nodes(node):
        yield from _messages(child, kind)


def _kind_of_call(call: ast.Call, kind: str) -> str:
    name = ast.unparse(call.func).rpartition(".")[2]
    if name in WARNINGS:
        return "warning"
    if name in LOGS and isinstance(call.func, ast.Attribute):
        return f"log {name}"
    return "print" if name == "print" else kind


def _text(node: ast.AST) -> str:
    """Return a string expression, with the code of its values in braces; empty if it is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return _value(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        if left or right:
            return (left or _value(node.left)) + (right or _value(node.right))
    return ""


def _value(node: ast.expr) -> str:
    """Return the code of a value in braces, without text, which versions of Python print in different ways."""
    has_text = any(isinstance(each, ast.JoinedStr | ast.comprehension) for each in ast.walk(node))
    return "{...}" if has_text else f"{{{ast.unparse(node)}}}"


def table() -> str:
    lines = []
    for path in sorted(PACKAGE.rglob("*.py"), key=str):
        rows = [f"  {kind}: {text}" for kind, text in messages(path)]
        if rows:
            lines += [str(path.relative_to(PACKAGE)), *rows, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    TABLE.write_text(table())
