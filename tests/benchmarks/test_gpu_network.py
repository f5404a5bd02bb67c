"""``python -m benchmarks gpu-network`` runs from one end to the other, on the CPU over gloo."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu_network
from benchmarks.__main__ import make_parser
from benchmarks.contenders import ROWS
from benchmarks.measure import Cell


def cell(row: str, seconds: float, **fields: float) -> Cell:
    return Cell(row, ROWS[row].title, "gpt124m", 2, 1, 1000.0, step_ms=1e3 * seconds, **fields)


def test_page_compares_every_row_with_its_bytes_and_with_computing_alone():
    cells = [
        cell("node_shared", 0.066),
        cell("ddp", 4.0, bytes_needed=500e6),
        cell("all_reduce_int8", 1.0, bytes_needed=125e6, messages=26.0, last_loss=9.5, peak_models=6.25),
    ]
    lines = gpu_network.page([cells], "A note.").splitlines()
    title = ROWS["all_reduce_int8"].title
    assert f"| {title} | 1.000 | 4.00x | 1.000 | 0.066 | 26 | 9.5000 | 6.2 |" in lines
    assert not any(ROWS["node_shared"].title in line for line in lines)


def test_a_row_that_failed_stands_in_the_page_with_its_error():
    failed = Cell("gossip", ROWS["gossip"].title, "gpt124m", 2, 1, None, error="hung\nfor 9 s")
    assert f"| {ROWS['gossip'].title} | hung for 9 s |" in gpu_network.page([[failed]], "")


@pytest.mark.timeout(300)
def test_a_dry_run_counts_two_messages_per_bucket_and_is_resumed(tmp_path, capsys):
    command = ["gpu-network", "--dry-run", "--rows", "all_reduce_int4", "--mbit", "1000", "--steps", "3"]
    arguments = make_parser().parse_args([*command, "--out", str(tmp_path), "--logs", str(tmp_path / "logs")])
    arguments.command(arguments)
    (stored,) = tmp_path.glob("gpt1m-2x1-*.json")
    row = json.loads(stored.read_text())["all_reduce_int4"]
    assert row["error"] is None
    assert 2.0 <= row["messages"] < 2.5  # the model is one bucket; the run begins with one message more
    assert "a dry run" in (tmp_path / "README.md").read_text()
    capsys.readouterr()
    arguments.command(arguments)  # nothing is left to measure
    assert "0 rows" in capsys.readouterr().out
