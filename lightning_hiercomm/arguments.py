"""Constructors that name the argument whose type is wrong, and values that are made by them."""

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
from typing import Any, ClassVar, Literal, TypeVar, Union, cast

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
V = TypeVar("V", bound="Value")

_CALLABLE = typing.get_origin(Callable[..., Any])
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    NoneType: "None",
    _CALLABLE: "a function",
}


def checked_arguments(function: F) -> F:
    """Decorate a constructor so that what it is given has the types of its annotations.

    Python lets ``sync_every="4"`` and ``sync_every=nan`` pass until a rank compares or divides, perhaps while others
    wait for it. What the values must be is the constructor's own matter, strings of a ``Literal`` included.

    Raises:
        TypeError: If a type is wrong or an argument is unknown, naming it.
        ValueError: If a number is not finite, likewise.
    """
    signature = inspect.signature(function)
    known = [name for name in signature.parameters if name not in ("self", "cls")]
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_more, takes_others = (kind in kinds for kind in _VARIADIC)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        is_constructor = function.__name__ == "__init__"
        owner = type(args[0]).__name__ if is_constructor else function.__name__
        for name in kwargs:
            if name not in known and not takes_others:
                raise unknown_argument(name, owner, known)
        values = args[is_constructor:]
        if len(values) > len(known) and not takes_more:
            raise TypeError(f"{owner} takes {', '.join(known) or 'no arguments'}, not {', '.join(map(repr, values))}")
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # too few, or one twice, which Python says itself
            return function(*args, **kwargs)
        named = {name: value for name, value in given.items() if signature.parameters[name].kind not in _VARIADIC}
        check_types(named, _hints_of(function))
        return function(*args, **kwargs)

    return cast(F, checked)


_get_type_hints = functools.cache(typing.get_type_hints)


def _hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return _get_type_hints(function)
    except NameError:  # somebody's own, whose annotations name what is there for type checkers only
        return {}


def as_call(instance: object, defaults: Mapping[str, Any]) -> str:
    """An object as one would write it: its first argument, and those that are not the default.

    Args:
        instance: Keeps its arguments as attributes of the same names.
        defaults: See :func:`defaults_of`.
    """
    values = {name: getattr(instance, name, default) for name, default in defaults.items()}
    said = [
        f"{name}={values[name]!r}"
        for index, (name, default) in enumerate(defaults.items())
        if index == 0 or values[name] != default
    ]
    return f"{type(instance).__name__}({', '.join(said)})"


def defaults_of(constructor: Callable[..., None]) -> dict[str, Any]:
    """The arguments that a constructor takes, and what each is if it is not given."""
    _, *parameters = inspect.signature(constructor).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters}


def _records(constructor: F) -> F:
    """Decorate the constructor of a :class:`Value`: what it is given is checked, and is what the value is from then."""
    signature, checked = inspect.signature(constructor), checked_arguments(constructor)

    @functools.wraps(constructor)
    def construct(self: Value, *args: Any, **kwargs: Any) -> None:
        checked(self, *args, **kwargs)
        if type(self).__init__ is construct:  # and no base's, which a constructor calls on its way
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            _, *own = given.arguments.items()
            self._given = _comparable(dict(own))

    return cast(F, construct)


class Value:
    """What somebody writes, by its constructor, and nobody changes: configuration.

    Its constructor is one with :func:`checked_arguments`, and sets attributes; once it has returned, nobody does. A
    value is printed as one would write it, is equal to another of the same class and arguments, and is its own copy. It
    can be pickled, and hashed, as far as its arguments can; lists, mappings and partial functions count by what is in
    them.

    Raises:
        AttributeError: When somebody changes it.
    """

    _given: tuple[Any, ...] | None = None  # the arguments, once the constructor has returned
    _defaults: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls._defaults = defaults_of(cls.__init__)
            setattr(cls, "__init__", _records(cls.__init__))  # noqa: B010

    @_records
    def __init__(self) -> None:
        """It has no arguments."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self._given is not None:
            raise AttributeError(f"{self!r} is configuration and does not change; write another one")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return as_call(self, self._defaults)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._given == vars(other).get("_given")

    def __hash__(self) -> int:
        return hash((type(self), self._given))

    def __copy__(self: V) -> V:
        return self

    def __deepcopy__(self: V, memo: dict[int, Any]) -> V:
        # nor is what makes optimizers copied: LightningCLI's leads to its parser, and from there to the Trainer
        return self


def _comparable(value: Any) -> Any:
    """The same as something that is equal where its contents are, and can be hashed if they can."""
    if isinstance(value, partial):
        return partial, value.func, _comparable(value.args), _comparable(value.keywords)
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    if isinstance(value, Mapping):
        return tuple((name, _comparable(value[name])) for name in sorted(value, key=str))
    return value


def unknown_argument(name: str, owner: str, known: Sequence[str]) -> TypeError:
    """The error about an argument that nobody knows, with the one that may have been meant.

    Args:
        name: Of the argument.
        owner: Whose.
        known: The names of those that there are.
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(known) or 'none'}."
    return TypeError(f"{owner} has no argument {name!r}. {hint}")


def checked_fields(cls: type[T]) -> type[T]:
    """Decorate a dataclass, from outside, so that its fields are :func:`checked_arguments`."""
    setattr(cls, "__init__", checked_arguments(cls.__init__))  # noqa: B010
    return cls


def check_types(given: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """See that values, by name, have the types that hints, by name, say.

    Raises:
        TypeError: If one has not, naming it.
        ValueError: If a number is not finite, likewise.
    """
    for name, value in given.items():
        if name not in hints:
            continue
        if not _fits(value, hints[name]):
            if isinstance(value, type) and _is_class_of(value, hints[name]):
                raise TypeError(f"{name}={value.__name__} is a class, but must be an instance: {value.__name__}(...)")
            shown, kind = " ".join(repr(value).split()), type(value).__name__
            raise TypeError(f"{name}={shown:.200} must be {_in_words(hints[name])}, not of type {kind}")
        if isinstance(value, Real) and not isinstance(value, Integral) and not math.isfinite(value):
            raise ValueError(f"{name}={value} must be finite")


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is Literal:
        return any(type(value) is type(option) for option in inner)
    kind = origin or hint
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if kind is _CALLABLE:
        return callable(value)
    if not isinstance(kind, type):
        return True
    if kind is list or kind is Sequence:  # a configuration file knows lists only
        return isinstance(value, (list, tuple)) and _all_fit(value, inner)
    if kind is dict or kind is Mapping:
        return isinstance(value, Mapping) and _all_fit(value, inner[:1]) and _all_fit(value.values(), inner[1:])
    return isinstance(value, kind)


def _is_class_of(value: type, hint: Any) -> bool:
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, UnionType) else (hint,)
    return any(isinstance(option, type) and issubclass(value, option) for option in options)


def _all_fit(values: Iterable[Any], inner: Sequence[Any]) -> bool:
    return not inner or all(_fits(value, inner[0]) for value in values)


def _in_words(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_in_words(option) for option in inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in (list, Sequence) and inner:
        return f"a list, of each {_in_words(inner[0])}"
    kind = origin or hint
    return _WORDS.get(kind) or f"a {getattr(kind, '__name__', kind)}"
