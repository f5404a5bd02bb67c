"""Markdown of docstrings: the reference of a class or function, as the documentation shows it."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

_SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields")
_ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")
_SECTION = re.compile(rf"^({'|'.join(_SECTIONS)}):$", re.MULTILINE)


def reference(name: str, *members: str) -> str:
    """Return the reference of a class or function.

    Args:
        name: Its full name.
        members: Of a class: ``"arguments"`` for those of its constructor alone; ``"members"`` for all documented
            methods and properties; or the names of some of them.
    """
    module, _, own = name.rpartition(".")
    documented = getattr(import_module(module), own)
    if members == ("arguments",):
        text = _sections(documented).get("Args") or _sections(documented.__init__)["Args"]
        return "\n".join(_entries(text, documented))
    parts = [f"### {own}", *_page(documented)]
    names = [each for each, value in vars(documented).items() if _is_documented(each, value)] if members else []
    if members not in ((), ("members",)):
        names = [each for entry in members for each in entry.split(", ")]
    if names:
        parts.append("Methods and properties:\n\n" + "\n".join(_member(documented, each) for each in names))
    return "\n\n".join(parts)


def _page(documented: Any) -> Iterator[str]:
    sections = _sections(documented)
    yield _text(sections[""])
    for title, heading in (("Args", "Arguments"), ("Attributes", "Attributes")):
        if title in sections:
            yield f"{heading}:\n\n" + "\n".join(_entries(sections[title], documented))


def _member(owner: type, name: str) -> str:
    member = inspect.getattr_static(owner, name)
    if isinstance(member, property):
        shown, member = name, member.fget
    else:
        member = getattr(owner, name)
        shown = f"{name}({', '.join(_parameters(member))})"
    first = _sections(member)[""].split("\n\n")[0]
    return f"- `{shown}`: {_inline(' '.join(first.split()))}"


def _parameters(function: Any) -> Iterator[str]:
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in ("self", "cls"):
            yield name if parameter.default is parameter.empty else f"{name}={parameter.default!r}"


def _is_documented(name: str, value: Any) -> bool:
    callable_or_property = inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod))
    return callable_or_property and not name.startswith("_") and bool(inspect.getdoc(value))


def _sections(documented: Any) -> dict[str, str]:
    """Return the sections of a docstring by their titles; what precedes them has none."""
    text = inspect.getdoc(documented) or ""
    start, *rest = _SECTION.split(text)
    found = {"": start}
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        indented = re.match(r"(?:\n|[ ]+[^\n]*(?:\n|$))*", body)
        assert indented is not None
        found[title] = textwrap.dedent(indented[0].strip("\n"))
        found[""] += body[indented.end() :]
    return {title: body.strip("\n") for title, body in found.items()}


def _entries(body: str, documented: Any) -> Iterator[str]:
    """Yield the list of a section."""
    parameters = inspect.signature(documented).parameters
    for entry in re.split(r"\n(?=\S)", body):
        name, _, meaning = entry.partition(":")
        yield f"- `{name}`{_default(parameters.get(name))}: {_inline(' '.join(meaning.split()))}"


def _default(parameter: inspect.Parameter | None) -> str:
    if parameter is None or parameter.default is parameter.empty:
        return ""
    return f" (`{parameter.default!r}`)"


def _inline(text: str) -> str:
    text = _ROLE.sub(r"`\1`", text)
    return re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)


def _text(body: str) -> str:
    """Return paragraphs, lists and blocks of code as Markdown."""
    lines: list[str] = []
    block: list[str] | None = None
    margin = 0
    for line in [*body.splitlines(), "end"]:
        indent = len(line) - len(line.lstrip())
        if block is not None:
            if not line.strip() or indent > margin:
                block.append(line)
                continue
            lines += _code(block, margin)
            block = None
        lines.append(_inline(line))
        if line.endswith("::"):
            lines[-1] = "" if line.strip() in ("Example::", "Examples::") else lines[-1][:-1]
            block, margin = [], indent
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines[:-1])).strip("\n")


def _code(block: list[str], margin: int) -> Iterator[str]:
    code = textwrap.dedent("\n".join(block)).strip("\n")
    try:
        ast.parse(code)
        language = "python"
    except SyntaxError:
        language = "text"
    yield ""
    yield from textwrap.indent(f"```{language}\n{code}\n```", " " * margin).splitlines()
    yield ""
