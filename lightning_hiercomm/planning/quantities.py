"""Read and print numbers with units."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_DURATIONS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {f"{prefix}byte": factor for prefix, factor in _PREFIXES.items()}
_BANDWIDTHS = {
    **_SIZES,
    **{f"{prefix}{bit}": factor / 8 for prefix, factor in _PREFIXES.items() for bit in ("bit", "b")},
}
_NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(\S*)\s*", re.IGNORECASE)


class QuantityError(argparse.ArgumentTypeError, ValueError):
    """A number with a unit is invalid; argparse prints the message."""


def bandwidth(text: str) -> float:
    """Read ``"10gbit"``, ``"300gbyte"``, ``"10Gb/s"``, ``"10Gbps"`` or ``"300GB/s"`` as bytes per second.

    Raises:
        QuantityError: If it is anything else, or not positive.
    """
    return _read(re.sub(r"(/s|ps)\s*$", "", text), _BANDWIDTHS, "a bandwidth such as 10gbit or 300gbyte")


def size(text: str) -> float:
    """Read ``"80gbyte"``, ``"80GB"`` or ``"24gib"`` as bytes.

    Raises:
        QuantityError: If it is anything else, or not positive.
    """
    return _read(re.sub(r"b\s*$", "B", text), _SIZES, "a size such as 80gbyte or 24gib")


def duration(text: str) -> float:
    """Read ``"50us"``, ``"2.5ms"``, ``"0.4s"``, ``"0.4"`` or ``"20min"`` as seconds.

    Raises:
        QuantityError: If it is anything else, or not positive.
    """
    return _read(text, _DURATIONS, "a duration such as 50us or 0.4s")


def count(text: str) -> float:
    """Read ``"1.3e9"``, ``"1.3b"`` or ``"350m"``.

    Raises:
        QuantityError: If it is anything else, or not positive.
    """
    return _read(text.lower(), _COUNTS, "a number such as 1.3e9 or 350m")


def _read(text: str, units: Mapping[str, float], what: str) -> float:
    match = _NUMBER.fullmatch(text)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    unit = re.sub("B$", "byte", match[2]).lower() if match else ""
    if math.isnan(number) or unit not in units:
        raise QuantityError(f"{text!r} is not {what}")
    if not 0 < number < math.inf:
        raise QuantityError(f"{text!r} must be positive and finite")
    return number * units[unit]


def shown_bytes(value: float) -> str:
    """Return ``"1.3 GB"``."""
    value = _rounded(value)  # first, or 999.6 kB would become 1,000 kB
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{_three_digits(value / factor)} {prefix}B"
    return f"{value:.3g} B"


def shown_seconds(value: float) -> str:
    """Return ``"12.5 ms"``."""
    value = _rounded(value)
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= factor:
            return f"{_three_digits(value / factor)} {unit}"
    return f"{value * 1e9:.3g} ns" if value else "0 s"


def _three_digits(value: float) -> str:
    return f"{_rounded(value):,.0f}" if value >= 100 else f"{value:.3g}"


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
