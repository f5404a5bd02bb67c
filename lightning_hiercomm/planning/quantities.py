"""Read and print numbers with units."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_DURATIONS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_BANDWIDTHS = {
    **{f"{prefix}byte": factor for prefix, factor in _PREFIXES.items()},
    **{f"{prefix}{bit}": factor / 8 for prefix, factor in _PREFIXES.items() for bit in ("bit", "b")},
}
_NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(\S*)\s*", re.IGNORECASE)


class QuantityError(argparse.ArgumentTypeError, ValueError):
    """A number with a unit is invalid; argparse prints the message."""


def bandwidth(text: str) -> float:
    """Read ``"10Gbit/s"``, ``"10gbit"``, ``"10Gbps"`` or ``"1.25GB/s"`` as bytes per second.

    Raises:
        QuantityError: If it is anything else, or not positive.
    """
    return _read(re.sub(r"(/s|ps)\s*$", "", text), _BANDWIDTHS, "a rate such as 10Gbit/s")


def duration(text: str) -> float:
    """Read ``"50us"``, ``"2.5ms"``, ``"0.4s"`` or ``"0.4"`` as seconds.

    Raises:
        QuantityError: If it is anything else, or not positive.
    """
    return _read(text, _DURATIONS, "a duration such as 0.12s or 50us")


def count(text: str) -> float:
    """Read ``"1.3e9"``, ``"1.3b"`` or ``"350M"``.

    Raises:
        QuantityError: If it is anything else, or not positive.
    """
    return _read(text.lower(), _COUNTS, "a number such as 125M")


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
    return _shown(value, {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})


def shown_rate(value: float) -> str:
    """Return ``"10 Gbit/s"`` of bytes per second."""
    return _shown(8 * value, {"Tbit/s": 1e12, "Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3, "bit/s": 1.0})


def shown_seconds(value: float) -> str:
    """Return ``"12.5 ms"``."""
    return _shown(value, {"s": 1.0, "ms": 1e-3, "us": 1e-6})


def shown_count(value: float) -> str:
    """Return ``"125 M"``."""
    return _shown(value, {"G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}).rstrip()


def _shown(value: float, units: Mapping[str, float]) -> str:
    """Return three digits with the largest unit that fits, or the smallest unit."""
    value = float(f"{value:.3g}")  # first, or 999.6 kB would become 1,000 kB
    unit, factor = next(((unit, factor) for unit, factor in units.items() if value >= factor), [*units.items()][-1])
    return f"{shown_number(value / factor)} {unit}"


def shown_number(value: float) -> str:
    """Return three digits."""
    value = float(f"{value:.3g}")
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
