"""Stored results are read back, whatever else lies beside them."""

from __future__ import annotations

import json

from benchmarks import report
from benchmarks.measure import Cell


def test_results_of_speed_are_found_beside_those_of_accuracy(tmp_path):
    cell = Cell("ddp", "Lightning DDPStrategy", "mlp11m", 2, 2, 500.0, step_ms=1200.0)
    report.save([cell], {"command": "python -m benchmarks speed"}, tmp_path)
    (tmp_path / "accuracy-digits-2x2-500mbit.json").write_text(json.dumps({"target": 0.5, "curves": {}}))
    assert [[cell.row for cell in cells] for cells in report.load(tmp_path)] == [["ddp"]]
    assert "Lightning DDPStrategy | 1200" in report.full_report(tmp_path)
