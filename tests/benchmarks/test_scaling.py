"""The table against the number of nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("benchmarks")

from benchmarks import report, scaling
from benchmarks.__main__ import make_parser
from benchmarks.contenders import ROWS
from benchmarks.measure import Cell


def cell(row: str, nodes: int, busy: float = 0.5, sent: float = 4e6, **fields) -> Cell:
    found = Cell(row, ROWS[row].title, "mlp1m", nodes, 1, 500.0, 1, step_ms=100.0, bound_ms=80.0, ratio=1.25, **fields)
    return Cell(**{**found.to_dict(), "bytes_per_step": sent, "bytes_needed": 4e6, "processor_share": busy})


def test_measured_bytes_stand_beside_those_of_the_formula():
    page = scaling.page([[cell("gossip", nodes, sent=4.2e6)] for nodes in (8, 2)])
    first, second = page.splitlines()[-2:]
    assert first == "| Gossip, overlapped | 1 | 2 | 4.200 | 4.000 | 1.050 | 100 | 80.0 | 1.25 | compute | 50% |"
    assert second.startswith("| | | 8 | 4.200 |"), "named once"
    assert "2(n-1)/n / 16" in scaling.page([[cell("periodic", 2)]])


def test_scaling_page_names_rows_limited_by_processors():
    page = scaling.page([[cell("local", 8, 1.0), cell("ddp", 8, 0.97), cell("gossip", 8, 0.4)]])
    assert "they are the limit, not the link: Lightning DDPStrategy on 8." in page
    assert "Computing alone takes 8 ranks 100 ms per step" in page
    assert "| processors | 97% |" in page
    assert "No row kept the processors busy" in scaling.page([[cell("ddp", 2, 0.2)]])


def test_a_row_that_failed_says_so_in_its_place():
    page = scaling.page([[cell("ddp", 2), Cell("ddp", "", "mlp1m", 4, 1, 500.0, error="it | hung")]])
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1
    assert "| 4 | it / hung |" in page


def test_without_results_it_says_what_to_do():
    assert "python -m benchmarks scaling" in scaling.page([])


def test_the_command_writes_table_and_picture_of_what_is_stored(tmp_path, capsys):
    arguments = make_parser().parse_args(["scaling", "--stored", "--out", str(tmp_path)])
    arguments.command(arguments)
    assert "Nothing was measured" in capsys.readouterr().out
    for nodes in (2, 4):
        report.save([cell("ddp", nodes), cell("gossip", nodes)], {}, tmp_path, prefix="scaling-")
    report.save([replace(cell("ddp", 8), mbit=100.0)], {}, tmp_path, prefix="scaling-")
    arguments.command(arguments)
    table = (tmp_path / "scaling.md").read_text()
    assert table.count("| 4.000 | 4.000 | 1.000 |") == 4, "the other rate is another question"
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
