"""Stored results are read back, whatever else lies beside them."""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks import report
from benchmarks.contenders import ROWS, is_ours, is_peer, same_method
from benchmarks.measure import Cell


def test_results_of_speed_are_found_beside_those_of_accuracy(tmp_path):
    cell = Cell("ddp", "Lightning DDPStrategy", "mlp11m", 2, 2, 500.0, step_ms=1200.0)
    report.save([cell], {"command": "python -m benchmarks speed"}, tmp_path)
    (tmp_path / "accuracy-digits-2x2-500mbit.json").write_text(json.dumps({"target": 0.5, "curves": {}}))
    assert [[cell.row for cell in cells] for cells in report.load(tmp_path)] == [["ddp"]]
    assert "| Lightning DDPStrategy | every step, overlapped | 1200 |" in report.full_report(tmp_path)


def cell(row: str, step_ms: float, ranks_per_node: int = 2, mbit: float | None = 500.0, **fields) -> Cell:
    nodes = 4 // ranks_per_node
    return Cell(row, ROWS[row].title, "mlp11m", nodes, ranks_per_node, mbit, 1, step_ms=step_ms, **fields)


def test_rows_are_called_what_they_are_called_now(tmp_path):
    report.save([replace(cell("ddp", 1200.0), title="an old name")], {"when": "2026-11-22T19:00:00+00:00"}, tmp_path)
    [[loaded]] = report.load(tmp_path)
    assert (loaded.title, loaded.when) == ("Lightning DDPStrategy", "2026-11-22T19:00:00+00:00")


def test_results_of_earlier_versions_show_what_is_known_of_their_spread(tmp_path):
    old = {**cell("ddp", 1200.0, spread_ms=40.0).to_dict(), "repetitions": 2}
    del old["step_ms_each"], old["processor_share"], old["when"]
    (tmp_path / "mlp11m-2x2-500mbit.json").write_text(json.dumps({"ddp": old}))
    [[loaded]] = report.load(tmp_path)
    assert report.measured(loaded) == "1200 ± 20"
    assert report.measured(cell("ddp", 1200.0, spread_ms=0.0)) == "1200", "one repetition has no spread"


def test_results_of_scaling_are_no_rows_of_speed(tmp_path):
    report.save([cell("ddp", 1200.0)], {}, tmp_path)
    report.save([cell("gossip", 800.0)], {}, tmp_path, prefix="scaling-")
    assert [[found.row for found in cells] for cells in report.load(tmp_path)] == [["ddp"]]
    assert [[found.row for found in cells] for cells in report.load(tmp_path, "scaling-")] == [["gossip"]]


def test_the_summary_tells_what_misses_its_target():
    cells = [
        cell("ddp", 1000.0),
        cell("all_reduce", 1100.0, ratio=1.2),
        cell("gossip", 700.0, ratio=1.1),
        cell("periodic", 200.0, ratio=1.081),
        cell("post_local_hook", 190.0),
        cell("torch_hierarchical", 210.0),
    ]
    *_, line = report.summary([cells]).splitlines()
    slower, blocking, overlapped, ahead = (part.strip() for part in line.split("|")[2:6])
    assert slower == "2 of 3; not AllReduce: 1100 against 1000 ms"
    assert blocking == "1 of 1"
    assert overlapped == "1 of 2; not AllReduce: 1.20"
    assert ahead.startswith("1 of 3; not AllReduce: 1100 against 1000 ms of Lightning DDPStrategy, PeriodicAveraging")
    assert "Lightning's loop" not in ahead
    loops = [cell("local", 3.0), cell("loop", 6.25)]
    assert "takes 6.25 ms in Lightning's loop, 3.00 ms in theirs" in report.summary([cells + loops])
    assert "no target" in report.summary([[replace(found, mbit=10000.0) for found in cells]])


def test_peers_without_inner_reduction_are_compared_with_their_like():
    assert same_method("periodic", 2) == ("post_local_hook", "torch_hierarchical")
    assert same_method("periodic_alone", 2) == ("hand", "accelerate", "torchft_local_sgd")
    assert {"post_local_hook", "hand", "accelerate"} <= set(same_method("periodic", 1))
    assert same_method("diloco@8", 1) == ("torchft_diloco@8",)
    for row in ROWS:
        for ranks_per_node in (1, 2):
            for peer in same_method(row, ranks_per_node):
                assert is_ours(row)
                assert is_peer(peer)
                assert ROWS[peer].period == ROWS[row].period
                assert (
                    ranks_per_node == 1
                    or row == "all_reduce"
                    or (ROWS[peer].averages_in_node == ROWS[row].averages_in_node)
                )


def test_a_row_says_whether_it_waits_and_what_limits_it():
    shown = report.table([cell("ddp", 1.0), cell("periodic", 216.0, bound_ms=216.0, bytes_needed=2.75e6)])
    assert "| PeriodicAveraging(16) | every 16 steps, blocking | 216 | 0.00x | 216 |  | compute |" in shown
    shown = report.table([cell("gossip", 799.0, bound_ms=705.12, bytes_needed=44.07e6)])
    assert "| every step, overlapped | 799 |  | 705 |  | link |" in shown


def test_quoted_rows_keep_the_requested_order():
    cells = [cell("ddp", 1000.0), cell("periodic", 200.0, bound_ms=190.0, bytes_per_step=2.8e6)]
    lines = report.quotation(cells, ["periodic", "gossip", "ddp"], bounds=True).splitlines()[2:]
    assert lines[0] == "| PeriodicAveraging(16) | 200 | 5.00x | 190 | 2.8 |"
    assert lines[1].startswith("| Lightning DDPStrategy | 1000 | 1.00x |")
