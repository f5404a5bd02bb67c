"""What LightningCLI prints of a mistake in what this package takes: the line that Python gives, and nothing else."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib
import inspect
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_hiercomm.arguments import unknown_argument

_PACKAGE = "lightning_hiercomm"
_OTHER = object()
"""What stands in a message and is no plain value: left out, for its default."""


def say_mistakes_as_python_does() -> None:
    """Let jsonargparse, if it is installed, end with the error that a program would get for the same arguments.

    ``Trainer(strategy=...)`` takes a string or a strategy, and that a scheme or a name. Of such a value jsonargparse
    says why it is none of both, in both places, below its usage: 50 to 70 lines with the cause in the middle, also for
    what our constructors refuse. Mistakes in other packages' arguments are printed as ever.
    """
    try:
        from jsonargparse import ArgumentParser
    except ImportError:
        return
    if hasattr(ArgumentParser.error, "__wrapped__"):
        return
    said_by_parser, instantiate = ArgumentParser.error, ArgumentParser.instantiate_classes

    def speaks(parser: ArgumentParser) -> bool:  # parsers inside of others hand on what they say
        return parser.exit_on_error and "JSONARGPARSE_DEBUG" not in os.environ

    @functools.wraps(said_by_parser)
    def error(self: ArgumentParser, message: str, ex: Exception | None = None) -> Any:
        line = cause(message) if speaks(self) else None
        if line is None:
            said_by_parser(self, message, ex)
        self.exit(2, f"error: {line}\n")

    @functools.wraps(instantiate)
    def instantiate_classes(self: ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        try:
            return instantiate(self, *args, **kwargs)
        except ValueError as refusal:
            line = cause(str(refusal)) if speaks(self) else None
            if line is None:
                raise
        self.exit(2, f"error: {line}\n")

    ArgumentParser.error = error  # type: ignore[method-assign]
    ArgumentParser.instantiate_classes = instantiate_classes  # type: ignore[method-assign]


def cause(message: str) -> str | None:
    """What Python says of the values that jsonargparse says something about.

    Args:
        message: Of jsonargparse, which ends with the value ("Given value: {'class_path': ...}").

    Returns:
        A line; None if no class of this package is among the values, or Python would take them.
    """
    for value in (*_values(message), *_single_arguments(message)):
        if not _names_ours(value):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _built(value)
        except Exception as refusal:
            return " ".join(str(refusal).split())
    return None


def _values(message: str) -> Iterator[Any]:
    """Those of a message that are written out, the outermost first."""
    for written in sorted(re.findall(r"value: (.+)$", message, re.MULTILINE), key=len, reverse=True):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            yield _plain(ast.parse(written, mode="eval").body)


def _single_arguments(message: str) -> Iterator[Any]:
    """What one argument of the command line gives a class: of that a message says the path, the name and the text."""
    paths = re.findall(r"Problem with given class_path '([\w.]+)'", message)
    given = re.findall(r"value: NestedArg\(key='(\w+)', val=(.+)\)$", message, re.MULTILINE)
    for path, (name, written) in zip(reversed(paths), given, strict=False):
        with contextlib.suppress(SyntaxError, ValueError):
            yield {"class_path": path, "init_args": {name: _scalar(ast.literal_eval(written))}}


def _scalar(text: Any) -> Any:
    """What YAML makes of the text of one value."""
    if text in ("null", "true", "false"):
        return {"null": None, "true": True, "false": False}[text]
    with contextlib.suppress(SyntaxError, ValueError):
        return ast.literal_eval(text)
    return text


def _plain(node: ast.expr) -> Any:
    """The value of a literal in which jsonargparse's namespaces may stand for dictionaries."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Namespace":
        return _without_others({keyword.arg: _plain(keyword.value) for keyword in node.keywords})
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else _OTHER for key in node.keys]
        return _without_others(dict(zip(keys, map(_plain, node.values), strict=True)))
    if isinstance(node, ast.List | ast.Tuple):
        return [_plain(element) for element in node.elts]
    if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
        return float(node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _OTHER


def _without_others(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: value for name, value in values.items() if name is not _OTHER and value is not _OTHER}


def _names_ours(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_names_ours, value))
    if not isinstance(value, dict):
        return False
    path = value.get("class_path")
    return (isinstance(path, str) and path.split(".")[0] == _PACKAGE) or any(map(_names_ours, value.values()))


def _built(value: Any) -> Any:
    """What a program that writes these classes and arguments gets."""
    if isinstance(value, list):
        return [*map(_built, value)]
    if not isinstance(value, dict) or not isinstance(value.get("class_path"), str):
        return value
    made = _class(value["class_path"])
    arguments = {name: _built(argument) for name, argument in (value.get("init_args") or {}).items()}
    arguments |= value.get("dict_kwargs") or {}
    if made.__module__.split(".")[0] == "torch":  # an outer optimizer, or its scheduler, before it meets parameters
        for name in arguments:
            if name not in inspect.signature(made).parameters:
                raise unknown_argument(name, made.__name__, [*inspect.signature(made).parameters][1:])
        return functools.partial(made, **arguments)
    return made(**arguments)


def _class(path: str) -> Any:
    """The class of a path; of a name alone, ours.

    Raises:
        AttributeError: If there is none, with the nearest there is.
    """
    module, _, name = path.rpartition(".")
    places = [importlib.import_module(place) for place in ([module] if module else [_PACKAGE, f"{_PACKAGE}.schemes"])]
    for place in places:
        if hasattr(place, name):
            return getattr(place, name)
    near = difflib.get_close_matches(name, [known for place in places for known in getattr(place, "__all__", ())], n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    raise AttributeError(f"module {places[0].__name__!r} has no attribute {name!r}{hint}")
