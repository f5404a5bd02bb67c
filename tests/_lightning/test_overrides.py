"""Every method that overrides one of Lightning's or torch's takes the calls that Lightning and torch make."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_hiercomm

UPSTREAM = ("lightning.", "torch.")
NOT_IMPORTED: tuple[str, ...] = (".__main__",)
if importlib.util.find_spec("ray") is None:  # an extra
    NOT_IMPORTED += (".trainer.ray",)


def own_classes() -> dict[str, type]:
    """All classes of the package, by module and name."""
    found = {}
    (root,) = lightning_hiercomm.__path__
    for path in sorted(Path(root).rglob("*.py")):
        name = ".".join(path.relative_to(Path(root).parent).with_suffix("").parts).removesuffix(".__init__")
        if not any(part in name for part in NOT_IMPORTED):
            for each in vars(importlib.import_module(name)).values():
                if inspect.isclass(each) and each.__module__ == name:
                    found[f"{each.__module__}.{each.__qualname__}"] = each
    return found


def plain(method: Any) -> Any:
    """The function of a method, or the getter of a property."""
    if isinstance(method, property):
        return method.fget
    return getattr(method, "__func__", method)


def overrides() -> Iterator[tuple[str, Any, Any]]:
    """Yield every method of the package that replaces an upstream one, in each class in which it does."""
    seen = set()
    for name, cls in own_classes().items():
        upstream = [base for base in cls.__mro__ if base.__module__.startswith(UPSTREAM)]
        for method in sorted({key for base in upstream for key in vars(base)} - {"__init__", "__new__"}):
            owner = next(base for base in cls.__mro__ if method in vars(base))
            own = plain(vars(owner)[method])
            if not owner.__module__.startswith("lightning_hiercomm") or not inspect.isfunction(own):
                continue
            replaced = plain(vars(next(base for base in upstream if method in vars(base)))[method])
            if inspect.isfunction(replaced) and names_arguments(replaced) and (own, replaced) not in seen:
                seen.add((own, replaced))
                yield f"{name}.{method}", own, replaced


def names_arguments(upstream: Any) -> bool:
    """Whether upstream fixes the arguments; those of ``training_step(*args, **kwargs)`` are the user's choice."""
    kinds = {parameter.kind for parameter in list(inspect.signature(upstream).parameters.values())[1:]}
    return kinds != {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def refused_call(own: Any, upstream: Any) -> str | None:
    """Return how a call that fits the upstream method does not fit ours; None if all do."""
    theirs = inspect.signature(upstream)
    positional = [
        p for p in theirs.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD or p.kind is p.POSITIONAL_ONLY
    ]
    by_name = [p.name for p in theirs.parameters.values() if p.kind is p.KEYWORD_ONLY]
    required = [p.name for p in positional if p.default is p.empty]
    names = [p.name for p in positional[1:]]
    calls = {
        "all arguments by position": (names, by_name),
        "all arguments by name": ([], [*names, *by_name]),
        "only required arguments": (
            required[1:],
            [name for name in by_name if theirs.parameters[name].default is inspect.Parameter.empty],
        ),
    }
    for call, (args, kwargs) in calls.items():
        try:
            inspect.signature(own).bind("self", *args, **dict.fromkeys(kwargs))
        except TypeError as error:
            return f"{call}: {error}; upstream is {theirs}, ours {inspect.signature(own)}"
    return None


OVERRIDES = {name: (own, upstream) for name, own, upstream in overrides()}


@pytest.mark.parametrize("name", OVERRIDES)
def test_override_takes_every_call_of_the_upstream_method(name):
    assert refused_call(*OVERRIDES[name]) is None
