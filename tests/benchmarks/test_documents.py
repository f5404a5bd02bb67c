"""Numbers in documents come from files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import documents
from benchmarks.documents import CHECKOUT, PAGES, SITE, without_generated, written
from benchmarks.passages import MEASURED, PASSAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_a_page_shows_what_it_is_generated_from(page):
    assert page.read_text() == written(page.read_text()), "python -m benchmarks documents"


def test_every_passage_and_every_measured_number_is_used():
    pages = "\n".join(map(Path.read_text, PAGES))
    assert set(re.findall(r"generated: passage / (.+?) -->", pages)) == set(PASSAGES)
    assert {name for passage in PASSAGES.values() for name in re.findall(r"\{(\w+)\}", passage)} == set(MEASURED)


def test_the_planner_knows_the_stored_accuracy():
    assert documents.ACCURACY.read_text() == documents.accuracy_table(), "python -m benchmarks documents"


def test_changed_digits_are_replaced():
    stored = written("<!-- generated: front in short / 8-adamw-short-cnn -->0<!-- end -->")
    assert "| AllReduce, int4 |" in stored
    assert written(stored.replace("9", "8")) == stored


_QUANTITY = (
    r"\d[\d.,]*(?: to [\d.,]+)? (?:%|ms\b|seconds\b|[MG]B\b|times\b|points\b)|\d ± \d|\d\.\d+x|(?<!\w)[+-]\d+\.\d+"
)
# Targets, defaults, assumptions, examples, definitions, arithmetic and the papers' claims, by page.
_NO_MEASUREMENT = {
    "README.md": {"95 %"},
    "docs/explanation/elastic.md": {"30 times"},
    "docs/explanation/front.md": {"93 %", "95 %"},
    "docs/explanation/papers.md": {"95 %"},
    "docs/howto/choose_a_scheme.md": {"95 %"},
    "docs/howto/debug_a_hang.md": {"30 seconds"},
    "docs/howto/plan_a_cluster.md": {"95 %"},
    "docs/howto/slurm.md": {"90 seconds"},
    "docs/howto/two_sites.md": {"40 ms"},
    "docs/reference/schemes/daso.md": {"3 %"},
}
_PREDICTED = {"docs/explanation/large_clusters.md"}  # all of its numbers come from a command that the page shows


@pytest.mark.parametrize("page", [CHECKOUT / "README.md", *SITE], ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_measured_numbers_are_generated(page):
    prose = without_generated(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    name = str(page.relative_to(CHECKOUT))
    if name not in _PREDICTED:
        assert set(re.findall(_QUANTITY, prose)) == _NO_MEASUREMENT.get(name, set())


def test_a_mark_without_a_result_is_an_error():
    with pytest.raises(KeyError):
        written("<!-- generated: tuned / nodes-8 / Unknown -->1.0<!-- end -->")
    assert without_generated("a <!-- generated: x -->1.0<!-- end --> b") == "a  b"
