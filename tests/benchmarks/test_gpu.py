"""``python -m benchmarks gpu`` runs from one end to the other, on the CPU in the GPU's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import ForkedPython, stand_in_for_python

from benchmarks import gpu
from benchmarks.__main__ import make_parser

REPORTS = (
    """
[gw0] [ 33%] PASSED tests/schemes/test_a.py::one[cuda, at once]
[gw1] [ 66%] FAILED tests/schemes/test_a.py::two[cuda]
[gw0] [100%] SKIPPED tests/comm/test_b.py::three
[gw1] [100%] ERROR tests/gpu/test_c.py::four[gossip, torch]
ERROR tests/run/test_d.py - ModuleNotFoundError: No module named 'x'
ERROR tests/gpu/test_c.py::four[gossip, torch] - wrong
FAILED tests/schemes/test_a.py::two[cuda] - wrong
""",
    """
tests/schemes/test_a.py::one[cuda, at once] PASSED              [ 33%]
tests/schemes/test_a.py::two[cuda] FAILED                       [ 66%]
tests/comm/test_b.py::three SKIPPED (there is no GPU)           [100%]
tests/gpu/test_c.py::four[gossip, torch] ERROR                  [100%]
ERROR tests/run/test_d.py - ModuleNotFoundError: No module named 'x'
ERROR tests/gpu/test_c.py::four[gossip, torch] - wrong
FAILED tests/schemes/test_a.py::two[cuda] - wrong
""",
)


def run(*arguments: str) -> None:
    parsed = make_parser().parse_args(["gpu", *arguments])
    parsed.command(parsed)


def test_a_fake_device_measures_rows_and_is_marked_as_fake(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("report", REPORTS, ids=["of several workers", "of one"])
def test_tests_are_counted_by_room_and_failures_named(report):
    counted = gpu.count_tests(report)
    assert counted == {
        "rooms": {
            "tests/comm": {"skipped": 1},
            "tests/gpu": {"failed": 1},
            "tests/run": {"failed": 1},
            "tests/schemes": {"passed": 1, "failed": 1},
        },
        "failed": [
            "tests/gpu/test_c.py::four[gossip, torch]",
            "tests/run/test_d.py",
            "tests/schemes/test_a.py::two[cuda]",
        ],
    }
    rows = [{"row": "none", "milliseconds": 2.0}, {"row": "ddp", "milliseconds": 3.0}, {"row": "daso", "error": "lost"}]
    rows[1]["waited_milliseconds"] = 0.25
    fits = {"differences": {"daso, torch": 1e-6, "gossip, torch": 0.5}, "fitted": 3}
    page = gpu.page({"device": "X", "about": "", "is_stand_in": False, "tests": counted, "fits": fits, "rows": rows})
    for line in (
        "| tests/schemes | 1 | 1 | 0 |",
        "| ddp | 3.00 | 1.50 | 0.25 |  |",
        "| daso | lost | | | |",
        "two[cuda]",
    ):
        assert line in page
    assert "1 of 2 fits end with the CPU's weights" in page
    assert "- apart: gossip, torch by 0.5" in page


def test_runs_without_time_left_are_named(tmp_path):
    run("--stand-in", "--no-fits", "--seconds", "0", "--rows", "ddp", "--out", str(tmp_path))
    page = (tmp_path / "the-cpu.md").read_text()
    assert "| ddp | left out: the time was up |" in page
    assert "Tests: left out: the time was up." in page


def test_tests_that_need_a_package_that_is_not_there_are_left_out_by_name(monkeypatch):
    monkeypatch.setattr(gpu, "NEEDED_BY_TESTS", ["pytest", "no_such_package"])
    assert gpu.run_tests("gpu", 1.0) == {"error": "left out: they need no_such_package (pip install no_such_package)"}


SLOW = """
import time

def test_quick():
    pass

def test_slow():
    time.sleep(600)
"""
TELLS = """
import pathlib, pytest

def pytest_configure(config):
    global prints
    prints = not hasattr(config, "workerinput")

@pytest.hookimpl(trylast=True)  # after it has been printed
def pytest_runtest_logreport(report):
    if prints and report.when == "teardown":
        pathlib.Path(__file__).with_name("reported").touch()
"""


@pytest.mark.nightly
def test_tests_that_have_run_when_the_time_is_up_are_counted(tmp_path, monkeypatch):
    (tmp_path / "test_slow.py").write_text(SLOW)
    (tmp_path / "conftest.py").write_text(TELLS)

    class UntilOneIsSlow(subprocess.Popen):
        def wait(self, timeout=None):
            while timeout == 77.0 and self.poll() is None:
                if (tmp_path / "reported").exists():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.05)
            return super().wait(timeout)

    monkeypatch.setattr(gpu.subprocess, "Popen", UntilOneIsSlow)
    counted = gpu.run_tests("not gpu", 77.0, [str(tmp_path)])
    assert sum(room.get("passed", 0) for room in counted["rooms"].values()) == 1
    fits = {"error": "left out"}
    page = gpu.page({"device": "X", "about": "", "is_stand_in": False, "tests": counted, "fits": fits, "rows": []})
    assert "Stopped after 77 s: others have not run." in page


def test_ranks_find_programs_on_the_path_of_the_parent(tmp_path, monkeypatch):
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "lightning_of_the_cluster.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "module"))
    looks = [sys.executable, "-S", "-c", "import lightning_of_the_cluster"]
    assert gpu.run_ranks([looks], seconds=60, folder=tmp_path) is None


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


def test_a_missing_gpu_is_reported(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU"):
        run("--out", str(tmp_path))
