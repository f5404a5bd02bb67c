"""Check arguments where they are given, before ranks wait for each other."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
V = TypeVar("V", bound="Value")

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_types(given: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Compare values, by name, with their annotated types.

    Raises:
        TypeError: If a value has another type.
        ValueError: If a value is not among the choices of a ``Literal``, or a number is not finite.
    """
    for name, value in given.items():
        hint = hints.get(name, Any)
        shown = f"{name}={' '.join(repr(value).split()):.200}"
        if not _fits(value, hint):
            remedy = f"; did you mean {value.__name__}()?" if isinstance(value, type) else ""
            raise TypeError(f"{shown} must be {_in_words(hint)}, not of type {type(value).__name__}{remedy}")
        if all(isinstance(option, str | None) for option in _options(hint)) and value not in _options(hint):
            raise ValueError(f"{shown} must be {_in_words(hint)}")
        if isinstance(value, Real) and not isinstance(value, Integral) and not math.isfinite(value):
            raise ValueError(f"{name}={value} must be finite")


def _options(hint: Any) -> list[Any]:
    """List the members of a union: types, and the values of a ``Literal``."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, UnionType):
        return [option for each in inner for option in _options(each)]
    return list(inner) if origin is Literal else [None if hint is NoneType else hint]


def _in_words(hint: Any) -> str:
    words = [
        each.__name__ if type(each) is type else str(each) if callable(each) else repr(each) for each in _options(hint)
    ]
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _fits(value: Any, hint: Any) -> bool:
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, option) for option in inner)
    if kind is Literal:
        return any(type(value) is type(option) for option in inner)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind in (list, Sequence):  # a configuration file has no tuples
        return isinstance(value, list | tuple) and all(_fits(each, inner[0]) for each in value if inner)
    if kind in (dict, Mapping):
        return isinstance(value, Mapping) and all(_fits(each, inner[0]) for each in value if inner)
    return isinstance(value, kind) if isinstance(kind, type) and kind is not Any else True


def checked_arguments(function: F) -> F:
    """Decorate a constructor so that it applies :func:`check_types` to its arguments.

    What else the values must be is the constructor's own matter.

    Raises:
        TypeError: If a type is wrong or an argument is unknown.
        ValueError: If a value is not among the choices, or a number is not finite.
    """
    signature = inspect.signature(function)
    own = [name for name, each in signature.parameters.items() if each.kind not in _VARIADIC and name != "self"]
    takes_others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        owner = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
        unknown = [name for name in kwargs if name not in own]
        if unknown and not takes_others:
            raise unknown_argument(unknown[0], owner, own)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{owner}: {error}. It takes {', '.join(own) or 'no arguments'}.") from None
        check_types({name: given[name] for name in own if name in given}, _hints_of(function))
        return function(*args, **kwargs)

    return cast(F, checked)


@functools.cache
def _hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError:  # a user's class, with annotations that exist for type checkers only
        return {}


def checked_fields(cls: type[T]) -> type[T]:
    """Decorate a frozen dataclass, from outside, so that its fields are :func:`checked_arguments`."""
    setattr(cls, "__init__", checked_arguments(cls.__init__))  # noqa: B010
    return cls


_owners: dict[str, list[str]] = {}


def note_owner(owner: str, names: Iterable[str]) -> None:
    """Let errors about arguments of these names, given to something else, name the calls that take them."""
    for name in names:
        _owners.setdefault(name, []).append(owner)


def unknown_argument(name: str, owner: str, known: Sequence[str]) -> TypeError:
    """Return the error for an unknown argument, with its owners, or the one that may have been meant."""
    if name in _owners:
        calls = " or ".join(f"{other}({name}=...)" for other in _owners[name])
        return TypeError(f"{owner} has no argument {name!r}: write {calls}")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(known) or 'none'}."
    return TypeError(f"{owner} has no argument {name!r}. {hint}")


def as_call(instance: object) -> str:
    """Return an object as its constructor's call: the first argument, and those that are not the default."""
    shown: list[str] = []
    for name, parameter in inspect.signature(type(instance)).parameters.items():
        value = getattr(instance, name, parameter.default)
        if not shown or value != parameter.default:
            shown.append(f"{name}={value!r}")
    return f"{type(instance).__name__}({', '.join(shown)})"


def _records(constructor: F) -> F:
    """Decorate the constructor of a :class:`Value` so that it checks and stores its arguments."""
    signature, checked = inspect.signature(constructor), checked_arguments(constructor)

    @functools.wraps(constructor)
    def construct(self: Value, *args: Any, **kwargs: Any) -> None:
        checked(self, *args, **kwargs)
        if type(self).__init__ is construct:  # not where a subclass's constructor calls it
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            _, *own = given.arguments.items()
            self._given = _comparable(dict(own))

    return cast(F, construct)


class Value:
    """Configuration: what a user writes by its constructor, and nothing changes afterwards.

    A value is printed as a call of its constructor, and equals another of the same class and arguments. It is its own
    copy, and can be pickled and hashed if its arguments can. Lists, mappings and partial functions are compared by
    their contents. The constructors of subclasses have :func:`checked_arguments`.

    Raises:
        AttributeError: If an attribute is set after the constructor has returned.
    """

    _given: tuple[Any, ...] | None = None  # the arguments, once the constructor has returned

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            setattr(cls, "__init__", _records(cls.__init__))  # noqa: B010

    @_records
    def __init__(self) -> None:
        """Take no arguments."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self._given is not None:
            raise AttributeError(f"{self!r} is configuration and does not change; write another one")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return as_call(self)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._given == vars(other).get("_given")

    def __hash__(self) -> int:
        return hash((type(self), self._given))

    def __copy__(self: V) -> V:
        return self

    def __deepcopy__(self: V, memo: dict[int, Any]) -> V:
        return self  # LightningCLI's factory of an optimizer refers to its parser, and so to the Trainer


def _comparable(value: Any) -> Any:
    """Return an equivalent that compares by contents, and is hashable if they are."""
    if isinstance(value, partial):
        return partial, value.func, _comparable(value.args), _comparable(value.keywords)
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    if isinstance(value, Mapping):
        return tuple((name, _comparable(value[name])) for name in sorted(value, key=str))
    return value
