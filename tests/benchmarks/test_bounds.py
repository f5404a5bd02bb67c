"""The arithmetic of what no method can beat."""

import pytest

from benchmarks import bounds
from benchmarks.contenders import ROWS
from benchmarks.workloads import WORKLOADS, parameter_count

MILLION = 1_000_000


@pytest.mark.parametrize(("nodes", "models"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75)])
def test_an_averaging_moves_two_shares_of_the_others(nodes: int, models: float) -> None:
    assert bounds.bytes_per_step(ROWS["all_reduce"], 25, nodes) == 100 * models


@pytest.mark.parametrize(
    ("row", "models_per_step"),
    [
        ("local", 0),
        ("ddp", 1),
        ("periodic", 1 / 16),
        ("periodic@8", 1 / 8),
        ("periodic_bf16", 1 / 32),
        ("diloco", 1 / 16),
        ("diloco_streaming", 1 / 16),
        ("diloco_int8", (1 / 4 + 1 / 512) / 16),
        ("diloco_streaming_int4", (1 / 8 + 1 / 512) / 16),
        ("daso", 1 / 4),
        ("gossip", 1),
        ("steps_delay", 1 / 2 * (1 + 1 / 4)),
    ],
)
def test_bytes_per_step_on_two_nodes(row: str, models_per_step: float) -> None:
    assert bounds.bytes_per_step(ROWS[row], MILLION, nodes=2) == pytest.approx(4 * MILLION * models_per_step)


def test_overlapped_rows_hide_the_shorter_of_compute_and_network() -> None:
    network = bounds.transfer_seconds(4 * MILLION, 500)
    assert bounds.step_seconds(ROWS["gossip"], MILLION, 2, 500, compute=0.01) == pytest.approx(network)
    assert bounds.step_seconds(ROWS["gossip"], MILLION, 2, 500, compute=0.1) == pytest.approx(0.1)
    assert bounds.step_seconds(ROWS["daso_stale"], MILLION, 2, 500, compute=0.01) == pytest.approx(network / 4)


@pytest.mark.parametrize(("workload", "millions"), [("mlp11m", 11.0), ("mlp1m", 1.0), ("mlp85k", 0.085)])
def test_workloads_have_the_size_they_are_named_for(workload: str, millions: float) -> None:
    assert parameter_count(WORKLOADS[workload].model()) / 1e6 == pytest.approx(millions, rel=0.02)
