"""Print numbers with units."""

from __future__ import annotations

from collections.abc import Mapping


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
