"""The tables of compressed gradients: step times against their bound, codecs against a copy of memory."""

from __future__ import annotations

import pytest

pytest.importorskip("benchmarks")

from benchmarks import gradients
from benchmarks.contenders import ROWS
from benchmarks.measure import Cell
from benchmarks.studies import codecs


def cell(row, step, bound=None, mbit=500.0, needed=0.0, error=None):
    ratio = step / bound if step and bound else None
    return Cell(row, row, "mlp11m", 2, 2, mbit, 3, step, 0.0, bound, ratio, bytes_needed=needed, error=error)


def test_gradients_are_compared_with_the_longer_of_computing_and_sending():
    cells = [
        *(cell("node", 150.0, 150.0), cell("node_shared", 120.0, 120.0), cell("node_shared", 125.0, 125.0, mbit=100.0)),
        cell("all_reduce_int4", 138.0, 120.0, needed=5.6e6),  # 90 ms on the link
        cell("all_reduce_int4", 493.0, 448.0, mbit=100.0, needed=5.6e6),
        cell("ddp", None, error="a rank died"),
    ]
    assert gradients.table(cells).splitlines()[2:] == [
        "| all_reduce_int4 | 500 | 138 | 120 | 90 | 120 | 1.15 |",
        "| all_reduce_int4 | 100 | 493 | 125 | 448 | 448 | 1.10 |",
        "| ddp | 500 | a rank died | | | | |",
    ]


def test_codecs_are_compared_with_a_copy_of_memory():
    seconds = codecs.measured(numel=3000, buckets=2, rounds=1)
    assert all(each > 0 for each in seconds.values())
    rows = codecs.table({**seconds, "memcpy": 0.002, "int4, encode with feedback": 0.004}, 4.0).splitlines()
    assert [row.split(" | ")[0] for row in rows[2:5]] == ["| memcpy", "| cast to bfloat16", "| int8, encode"]
    (row,) = (row for row in rows if "int4, encode with feedback" in row)
    assert row.startswith("| int4, encode with feedback | 4.00 | 1.0 | 2.00 | ")
    assert len(rows) == 16


@pytest.mark.parametrize("row", gradients.ROWS)
def test_every_row_of_gradients_exists(row):
    assert ROWS[row].bound == "overlapped"
