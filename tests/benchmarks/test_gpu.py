"""``python -m benchmarks gpu`` runs from one end to the other, on the CPU in the GPU's place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.__main__ import make_parser

REPORT = """<testsuites><testsuite>
<testcase classname="tests.schemes.test_a" name="one[cuda]" />
<testcase classname="tests.schemes.test_a" name="two[cuda]"><failure>wrong</failure></testcase>
<testcase classname="tests.comm.test_b" name="three"><skipped /></testcase>
</testsuite></testsuites>"""


def run(*arguments: str) -> None:
    parsed = make_parser().parse_args(["gpu", *arguments])
    parsed.command(parsed)


def test_a_stand_in_measures_rows_and_says_that_it_is_one(tmp_path):
    run("--stand-in", "--tests", "--rows", "periodic, staged", "--out", str(tmp_path))
    found = json.loads((tmp_path / "the-cpu.json").read_text())
    assert [row["row"] for row in found["rows"]] == ["periodic, staged"]
    assert all(row["milliseconds"] > 0 for row in found["rows"]), found["rows"]
    page = (tmp_path / "the-cpu.md").read_text()
    assert "A stand-in" in page
    assert "| periodic, staged | " in page


def test_tests_are_counted_by_room_and_failures_named(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    counted = gpu.count_tests(tmp_path / "report.xml")
    assert counted == {
        "rooms": {"tests.comm": {"skipped": 1}, "tests.schemes": {"passed": 1, "failed": 1}},
        "failed": ["tests.schemes.test_a::two[cuda]"],
    }
    rows = [{"row": "none", "milliseconds": 2.0}, {"row": "ddp", "milliseconds": 3.0}, {"row": "daso", "error": "lost"}]
    page = gpu.page({"device": "X", "about": "", "is_stand_in": False, "tests": counted, "rows": rows})
    for line in ("| tests.schemes | 1 | 1 | 0 |", "| ddp | 3.00 | 1.50 |  |", "| daso | lost | | |", "two[cuda]"):
        assert line in page


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU"):
        run("--out", str(tmp_path))
