"""Pages and pictures are what the stored results give."""

from __future__ import annotations

import re

from benchmarks import report, scaling, startup
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
