"""The command line of the benchmarks."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import make_parser

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["speed", "latency", "one-node", "accuracy", "timeline", "papers", "report"])
def test_results_go_where_git_does_not_look_unless_asked(command):
    parser = make_parser()
    out = parser.parse_args([command]).out
    ignored = subprocess.run(["git", "check-ignore", "--quiet", "--no-index", out / "speed.json"], cwd=CHECKOUT)
    if ignored.returncode != 128:  # a source distribution is no checkout
        assert ignored.returncode == 0
    assert parser.parse_args([command, "--out", "benchmarks/results"]).out == Path("benchmarks/results")
