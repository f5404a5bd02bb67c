"""Writes to parameters between two steps are detected without reading all parameters at every step."""

from __future__ import annotations

import pytest
import torch

from lightning_hiercomm.schemes.steps_delay import writes
from lightning_hiercomm.schemes.steps_delay.writes import WriteDetector


@pytest.fixture
def parameters():
    return [torch.nn.Parameter(torch.full((5,), float(index))) for index in range(16)]


@pytest.fixture
def reads(monkeypatch):
    """Counts the parameters whose bits are read."""
    counted = []
    original = writes._sums_of_bits  # noqa: SLF001
    monkeypatch.setattr(writes, "_sums_of_bits", lambda tensor: (counted.append(tensor), original(tensor))[1])
    return counted


def test_an_eighth_of_the_parameters_is_read_where_no_write_was_counted(parameters, reads):
    detector = WriteDetector(parameters)
    seen = []
    for _ in range(8):
        reads.clear()
        detector.compare()
        assert len(reads) == 2
        seen += map(id, reads)
        detector.remember()
    assert set(seen) == set(map(id, parameters))
    assert not detector.has_found_any


def test_a_counted_write_to_any_parameter_is_found_at_the_next_step(parameters):
    for parameter in parameters:
        detector = WriteDetector(parameters)
        with torch.no_grad():
            parameter.add_(1.0)
        detector.compare()
        assert detector.has_found_any


def test_repeated_writes_through_data_are_found_within_eight_steps(parameters):
    for parameter in parameters:
        detector = WriteDetector(parameters)
        for _ in range(8):
            parameter.data.add_(1.0)
            detector.compare()
            detector.remember()
        assert detector.has_found_any


def test_single_write_through_data_is_found_by_full_comparison(parameters):
    detector = WriteDetector(parameters)
    parameters[5].data.neg_()
    detector.compare(all_parameters=True)
    assert detector.has_found_any


def test_values_that_are_replaced_and_restored_are_no_write(parameters):
    detector = WriteDetector(parameters)
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
        detector.remember_shown()
        detector.compare()
        for parameter, values in zip(parameters, before, strict=True):
            parameter.copy_(values)
    detector.compare(all_parameters=True)
    assert not detector.has_found_any
