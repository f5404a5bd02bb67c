"""``python -m benchmarks gpu-network`` runs from one end to the other, on the CPU over gloo."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import make_parser


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
