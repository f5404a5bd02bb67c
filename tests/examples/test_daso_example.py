"""Digits with DASO, run the way its configuration says."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_daso_trains_digits_as_well_as_all_reduce_within_one_point(folder, all_reduce_accuracy):
    daso = folder.accuracy(folder.fit_digits("--config", folder.digits / "daso.yaml"))
    assert daso >= 97
    assert daso >= all_reduce_accuracy - 1
