"""Pages and pictures are what the stored results give."""

from __future__ import annotations

import re
import shutil

import pytest

from benchmarks import report, scaling, startup
from benchmarks.__main__ import make_parser
from benchmarks.documents import CHECKOUT

RESULTS = CHECKOUT / "benchmarks" / "results"


def test_stored_pages_equal_the_reports_output():
    assert (RESULTS / "README.md").read_text() == report.full_report(RESULTS)
    assert (RESULTS / "scaling.md").read_text() == scaling.page(report.load(RESULTS, "scaling-"))
    assert (RESULTS / "startup.md").read_text() == startup.page(*startup.load(RESULTS / "startup.json"))


def test_stored_pictures_are_shown_by_a_page_and_small():
    pages = [*RESULTS.rglob("*.md"), *(CHECKOUT / "docs").rglob("*.md")]
    shown = {
        (page.parent / link).resolve() for page in pages for link in re.findall(r"\]\((\S+\.png)\)", page.read_text())
    }
    stored = set(RESULTS.rglob("*.png"))
    assert stored
    assert stored - shown == set(), "delete them: `python -m benchmarks report` draws them again"
    assert [picture for picture in stored if picture.stat().st_size > 50_000] == []


@pytest.mark.nightly
@pytest.mark.long("draws all pictures of the stored results")
@pytest.mark.parametrize(
    ("command", "pictures"),
    [
        (
            ["report"],
            ["rows-mlp1m-4x1-500mbit.png", "accuracy-characters-2x2-500mbit.png", "front/8-sgd-short-cnn.png"],
        ),
        (["scaling", "--stored"], ["scaling.png"]),
        (["papers", "--stored"], ["000.png", "001.png", "002.png", "003.png", "004.png"]),
    ],
    ids=["report", "scaling", "papers"],
)
def test_commands_draw_all_that_is_stored(tmp_path, command, pictures):
    results = tmp_path / "results"
    source = RESULTS / "papers" if command[0] == "papers" else RESULTS
    shutil.copytree(source, results, ignore=shutil.ignore_patterns("*.png", "*.md"))
    arguments = make_parser().parse_args([*command, "--out", str(results)])
    arguments.command(arguments)
    assert all((results / name).stat().st_size > 10_000 for name in pictures)
