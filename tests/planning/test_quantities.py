"""Numbers with units."""

from __future__ import annotations

import pytest

from lightning_hiercomm.planning import quantities


@pytest.mark.parametrize(
    ("shown", "value"),
    [
        (quantities.shown_bytes(1.34e9), "1.34 GB"),
        (quantities.shown_bytes(12), "12 B"),
        (quantities.shown_bytes(9.996e8), "1 GB"),
        (quantities.shown_bytes(1.2345e16), "12,300 TB"),
        (quantities.shown_seconds(0.0125), "12.5 ms"),
        (quantities.shown_seconds(0.99951), "1 s"),
        (quantities.shown_seconds(12345), "12,300 s"),
        (quantities.shown_seconds(0), "0 us"),
        (quantities.shown_seconds(2e-7), "0.2 us"),
        (quantities.shown_rate(1.25e9), "10 Gbit/s"),
        (quantities.shown_count(1.25e8), "125 M"),
        (quantities.shown_number(1282.6), "1,280"),
        (quantities.shown_number(0.01547), "0.0155"),
    ],
)
def test_quantities_are_shown_with_three_digits(shown, value):
    assert shown == value
