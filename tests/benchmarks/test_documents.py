"""Numbers in documents come from files."""

from __future__ import annotations

import re

import pytest

from benchmarks import documents
from benchmarks.documents import CHECKOUT, PAGES, SUBSTITUTIONS, without_marked, written


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_a_page_shows_the_stored_results(page):
    assert page.read_text() == written(page.read_text()), "python -m benchmarks documents"


def test_substitutions_equal_the_stored_results():
    assert SUBSTITUTIONS.read_text() == documents.substitutions(), "python -m benchmarks documents"


def test_the_planner_knows_the_stored_accuracy():
    assert documents.ACCURACY.read_text() == documents.accuracy_table(), "python -m benchmarks documents"


def test_changed_digits_are_replaced():
    stored = written("<!-- measured: front in short / 8-adamw-short-cnn -->0<!-- end -->")
    assert "| AllReduce, int4 |" in stored
    assert written(stored.replace("9", "8")) == stored


PAGES_OF_SITE = (p for p in (CHECKOUT / "docs").rglob("*.md") if "_build" not in p.parts)
SITE = [CHECKOUT / "README.md", *sorted(PAGES_OF_SITE)]
_QUANTITY = (
    r"\d[\d.,]*(?: to [\d.,]+)? (?:%|ms\b|seconds\b|[MG]B\b|times\b|points\b)|\d ± \d|\d\.\d+x|(?<!\w)[+-]\d+\.\d+"
)
# Targets, defaults, assumptions, examples, definitions, arithmetic and the papers' claims, by page.
_NO_MEASUREMENT = {
    "README.md": {"95 %"},
    "docs/explanation/cost_model.md": {"20 %"},
    "docs/explanation/elastic.md": {"30 times"},
    "docs/explanation/front.md": {"93 %", "95 %"},
    "docs/explanation/papers.md": {"1 to 11 points", "110 %", "95 %"},
    "docs/howto/choose_a_scheme.md": {"95 %"},
    "docs/howto/debug_a_hang.md": {"30 seconds"},
    "docs/howto/plan_a_cluster.md": {"95 %"},
    "docs/howto/slurm.md": {"90 seconds"},
    "docs/howto/two_sites.md": {"40 ms"},
    "docs/reference/schemes/daso.md": {"3 %"},
}
_PREDICTED = {"docs/explanation/large_clusters.md"}  # all of its numbers come from a command that the page shows


@pytest.mark.parametrize("page", SITE, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_measured_numbers_are_substitutions(page):
    prose = without_marked(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    name = str(page.relative_to(CHECKOUT))
    if name not in _PREDICTED:
        assert set(re.findall(_QUANTITY, prose)) == _NO_MEASUREMENT.get(name, set())


def test_a_mark_without_a_result_is_an_error():
    with pytest.raises(KeyError):
        written("<!-- measured: tuned / nodes-8 / Unknown -->1.0<!-- end -->")
    assert documents.without_marked("a <!-- measured: x -->1.0<!-- end --> b") == "a  b"
