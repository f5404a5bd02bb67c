"""Numbers with units, as people write them on a command line."""

from __future__ import annotations

import math
import re

_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2.0**10,
    "mi": 2.0**20,
    "gi": 2.0**30,
    "ti": 2.0**40,
}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_DURATIONS = {
    "": 1.0,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "ns": 1e-9,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ]*)\s*(/s)?\s*", re.IGNORECASE)


def bandwidth(text: str) -> float:
    """``"10gbit"``, ``"300gbyte"``, ``"10Gb/s"``, ``"10Gbps"``, ``"300GB/s"``, ``"300GBps"``, as bytes per second.

    Raises:
        ValueError: For anything else, or if it is not positive.
    """
    number, unit, _ = _parts(text, "a bandwidth such as 10gbit or 300gbyte")
    short = 1.0 if unit.endswith(("B", "Bps")) else 1 / 8
    units = {"bit": 1 / 8, "byte": 1.0, "bps": short, "b": short}
    prefix, per_unit = _split(unit, units, text, "10gbit or 300gbyte")
    return number * prefix * per_unit


def size(text: str) -> float:
    """``"80gbyte"``, ``"24gib"``, as bytes.

    Raises:
        ValueError: For anything else, or if it is not positive.
    """
    number, unit, per_second = _parts(text, "a size such as 80gbyte or 24gib")
    if per_second:
        raise ValueError(f"{text!r} is not a size; write 80gbyte or 24gib")
    prefix, per_unit = _split(unit, {"byte": 1.0, "b": 1.0}, text, "80gbyte or 24gib")
    return number * prefix * per_unit


def duration(text: str) -> float:
    """``"50us"``, ``"2.5ms"``, ``"0.4s"``, ``"0.4"``, ``"20min"``, ``"3h"`` or ``"2d"``, as seconds.

    Raises:
        ValueError: For anything else, or if it is not positive.
    """
    number, unit, per_second = _parts(text, "a duration such as 50us or 0.4s")
    if per_second or unit.lower() not in _DURATIONS:
        raise ValueError(f"{text!r} is not a duration; write 50us, 2.5ms or 0.4s")
    return number * _DURATIONS[unit.lower()]


def count(text: str) -> float:
    """``"1.3e9"``, ``"1.3b"``, ``"350m"``.

    Raises:
        ValueError: For anything else, or if it is not positive.
    """
    number, unit, per_second = _parts(text, "a number such as 1.3e9 or 350m")
    if per_second or unit.lower() not in _COUNTS:
        raise ValueError(f"{text!r} is not a number; write 1.3e9, 1.3b or 350m")
    return number * _COUNTS[unit.lower()]


def _parts(text: str, what: str) -> tuple[float, str, str]:
    match = _NUMBER.fullmatch(text)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or math.isnan(number):
        raise ValueError(f"{text!r} is not {what}")
    if not 0 < number < math.inf:
        raise ValueError(f"{text!r} must be positive and finite")
    return number, match[2], match[3] or ""


def _split(unit: str, units: dict[str, float], text: str, such_as: str) -> tuple[float, float]:
    """The factors of a prefix and of a unit."""
    for name, factor in units.items():
        prefix = unit.lower().removesuffix(name)
        if prefix != unit.lower() and prefix in _PREFIXES:
            return _PREFIXES[prefix], factor
    raise ValueError(f"{text!r} has no unit that is known here; write {such_as}")


def shown_bytes(value: float) -> str:
    """For people: ``"1.3 GB"``."""
    value = _rounded(value)  # before its unit is chosen, or there would be 1,000 of a smaller one
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{_three_digits(value / factor)} {prefix}B"
    return f"{value:.3g} B"


def shown_seconds(value: float) -> str:
    """For people: ``"12.5 ms"``."""
    value = _rounded(value)
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= factor:
            return f"{_three_digits(value / factor)} {unit}"
    return f"{value * 1e9:.3g} ns" if value else "0 s"


def shown_price(value: float) -> str:
    """For people: ``"27,300"``, ``"0.123"``."""
    return _three_digits(value)


def _three_digits(value: float) -> str:
    return f"{_rounded(value):,.0f}" if value >= 100 else f"{value:.3g}"


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
