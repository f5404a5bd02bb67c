"""What a plan knows of accuracy."""

from __future__ import annotations

import pytest

from lightning_hiercomm.planning.predict.accuracy import Measured, accuracy, measured
from lightning_hiercomm.schemes import DASO, AllReduce, DiLoCo, Gossip, PeriodicAveraging, StepsDelay

ROWS = [
    Measured(8, "AllReduce", 1, "int4", -1.4, 2.3),
    Measured(8, "AllReduce", 1, "int4", -0.4, 0.6),
    Measured(2, "PeriodicAveraging", 4, "int4", -0.8, 0.6),
    Measured(2, "PeriodicAveraging", 16, "float32", -2.9, -1.4),
    Measured(8, "PeriodicAveraging", 2, "float32", -2.3, 2.6),
    Measured(8, "PeriodicAveraging", 2, "float32", -2.4, -0.3),
    Measured(8, "PeriodicAveraging", 2, "int4", -0.9, 0.3),
]


def look_up(kind, arguments, wire, nodes):
    return str(accuracy(kind, arguments, wire, nodes, ROWS))


def test_float32_gradients_at_every_step_train_as_ddp():
    assert look_up(None, {}, None, 8) == "as DDP"
    assert look_up(AllReduce, {}, None, 8) == "as DDP"


@pytest.mark.parametrize(
    ("wire", "found"),
    [
        ("bfloat16", "no loss over 1 point seen (-1.4 to 2.3)"),
        ("int8", "no loss over 1 point seen (-1.4 to 2.3)"),
        ("int4", "no loss over 1 point seen (-1.4 to 2.3)"),  # the lowest of several intervals
        ("top4", "not measured"),
    ],
)
def test_a_type_wider_than_one_without_loss_has_none(wire, found):
    assert look_up(AllReduce, {}, wire, 8) == found


@pytest.mark.parametrize(
    ("sync_every", "found"),
    [
        (1, "no loss over 1 point seen (-0.8 to 0.6)"),
        (4, "no loss over 1 point seen (-0.8 to 0.6)"),
        (8, "not measured"),
        (16, "lost (-2.9 to -1.4)"),
        (64, "lost (-2.9 to -1.4)"),
    ],
)
def test_a_period_between_a_kept_and_a_lost_one_is_not_measured(sync_every, found):
    assert look_up(PeriodicAveraging, {"sync_every": sync_every}, "bfloat16", 2) == found


def test_a_loss_that_is_surely_below_a_point_does_not_count():
    rows = [Measured(8, "Gossip", 1, "int4", -0.9, -0.1), Measured(8, "Gossip", 1, "int8", -1.1, -0.1)]
    assert [row.is_lost for row in rows] == [False, True]
    assert str(accuracy(Gossip, {}, "int4", 8, rows[:1])) == "no loss over 1 point seen (-0.9 to -0.1)"
    assert str(accuracy(Gossip, {}, "int4", 8, rows)) == "lost (-1.1 to -0.1)"


@pytest.mark.parametrize("nodes", [3, 8, 100])
def test_rows_of_at_least_as_many_nodes_count(nodes):
    assert look_up(PeriodicAveraging, {"sync_every": 4}, "int4", nodes) == "lost (-2.4 to -0.3)"


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (Gossip, {}),
        (StepsDelay, {"delay": 4, "warmup_steps": 400}),
        (DASO, {"sync_every": 4, "staleness": 2}),
        (DiLoCo, {"sync_every": 64, "fragments": 4, "staleness": 1}),
    ],
)
def test_settings_without_a_row_are_not_measured(kind, arguments):
    assert look_up(kind, arguments, None, 8) == "not measured"


def test_the_package_brings_the_measured_table():
    assert accuracy(AllReduce, {}, "int4", 8).kind == "no loss over 1 point seen"
    assert accuracy(PeriodicAveraging, {"sync_every": 16}, None, 8).kind == "lost"
    assert {row.nodes for row in measured()} >= {2, 8}
