"""Warnings of runs that are too short for their scheme."""

import math

import pytest

from lightning_hiercomm.schemes import DiLoCo


@pytest.mark.parametrize(
    ("scheme", "nodes", "steps", "said"),
    [
        (DiLoCo(16), 8, 512, "synchronizes nodes 32 times in this run of 512 optimizer steps"),
        (DiLoCo(16, warmup_steps=256), 8, 512, "synchronizes nodes 16 times in this run of 512 optimizer steps"),
        (DiLoCo(16), 8, 3199, "synchronizes nodes 199 times in this run of 3199 optimizer steps"),
        (DiLoCo(16), 8, 3200, None),
        (DiLoCo(16), 8, math.inf, None),
        (DiLoCo(16), 1, 512, None),
        (DiLoCo(16), 8, 15, "but the run ends after 15"),
    ],
)
def test_diloco_warns_of_fewer_than_200_synchronizations(scheme, nodes, steps, said):
    warnings = list(scheme.check_run(nodes, 100, steps))
    assert [said in warning for warning in warnings] == ([True] if said else [])
