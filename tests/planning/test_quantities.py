"""Numbers with units."""

from __future__ import annotations

import pytest

from lightning_hiercomm.planning import quantities

READ = {
    quantities.bandwidth: {
        **{"10gbit": 1.25e9, "10Gbit/s": 1.25e9, "10Gb/s": 1.25e9, "10Gbps": 1.25e9, "10GBps": 1e10, "300gbyte": 3e11},
        **{"300GB/s": 3e11, "1e2 mbit": 1.25e7, "8bit": 1.0},
    },
    quantities.duration: {"50us": 5e-5, "2.5 ms": 2.5e-3, "0.4": 0.4, "0.4s": 0.4},
    quantities.count: {"1.3e9": 1.3e9, "1.3b": 1.3e9, "350M": 3.5e8, "7": 7},
}


@pytest.mark.parametrize(
    ("reader", "text", "value"), [(reader, *pair) for reader, pairs in READ.items() for pair in pairs.items()]
)
def test_quantities_are_read_with_their_units(reader, text, value):
    assert reader(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("reader", "text", "message"),
    [
        (quantities.bandwidth, "10", "10Gbit/s"),
        (quantities.bandwidth, "10 parsec", "not a rate"),
        (quantities.bandwidth, "fast", "not a rate such as 10Gbit/s"),
        (quantities.bandwidth, "0gbit", "must be positive"),
        (quantities.bandwidth, "1e999gbit", "must be positive and finite"),
        (quantities.duration, "4 hours", "not a duration"),
        (quantities.duration, "-4", "not a duration"),
        (quantities.duration, "0.4/s", "not a duration"),
        (quantities.count, "350m/s", "not a number"),
        (quantities.count, "1.2.3", "not a number"),
        (quantities.count, "3 dozen", "not a number"),
    ],
)
def test_invalid_quantities_are_refused(reader, text, message):
    with pytest.raises(ValueError, match=message):
        reader(text)


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
