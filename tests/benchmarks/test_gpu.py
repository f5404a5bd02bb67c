"""``python -m benchmarks gpu`` runs from one end to the other, on the CPU in the GPU's place."""

from __future__ import annotations

import json
import os

import pytest
from forked import ForkedPython, stand_in_for_python

from benchmarks import gpu
from benchmarks.__main__ import make_parser


def run(*arguments: str) -> None:
    parsed = make_parser().parse_args(["gpu", *arguments])
    parsed.command(parsed)


def test_stand_in_measures_rows_and_its_page_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.sys, "executable", stand_in_for_python())
    run("--stand-in", "--no-fits", "--tests", "--rows", "periodic, staged", "--out", str(tmp_path))
    found = json.loads((tmp_path / "the-cpu.json").read_text())
    assert [row["row"] for row in found["rows"]] == ["periodic, staged"]
    assert all(row["milliseconds"] > 0 for row in found["rows"]), found["rows"]
    page = (tmp_path / "the-cpu.md").read_text()
    assert "A stand-in" in page
    assert "| periodic, staged | " in page


@pytest.mark.parametrize("row", gpu.ROWS)
def test_every_row_has_a_strategy_that_can_be_made(row):
    assert gpu.strategy_of(row) is not None


# what torch and lightning do without; they import matplotlib and the like by themselves where these are installed
WITHOUT = """
import runpy, sys
for name in [*sys.modules]:
    if name.split(".")[0] in ("benchmarks", "lightning_hiercomm"):
        del sys.modules[name]
for name in ("pytest", "hypothesis", "sklearn", "mpi4py", "mnist1d"):
    sys.modules[name] = None
sys.argv = ["benchmarks", "gpu", "--help"]
runpy.run_module("benchmarks", run_name="__main__")
"""


def test_gpu_benchmark_needs_only_torch_and_lightning(tmp_path):
    program = ForkedPython(["-c", WITHOUT], os.environ, tmp_path / "said", gpu.ROOT)  # has imported both already
    said, _ = program.communicate(timeout=200)
    assert "two processes" in said.lower(), said[-2000:]
