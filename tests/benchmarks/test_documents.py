"""Numbers in documents come from files."""

from __future__ import annotations

import re

import pytest

from benchmarks import documents
from benchmarks.documents import CHECKOUT, PAGES, without_marked, written


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_a_page_says_what_is_stored(page):
    assert page.read_text() == written(page.read_text()), "python -m benchmarks documents"


def test_the_planner_knows_the_stored_accuracy():
    assert documents.ACCURACY.read_text() == documents.accuracy_table(), "python -m benchmarks documents"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_changed_digits_are_found(page):
    text = changed = page.read_text()
    for mark in re.finditer(r"<!-- measured: [^>]+ -->[^<]*?(\d)", text):
        place = mark.start(1)
        changed = changed[:place] + str((int(text[place]) + 1) % 10) + changed[place + 1 :]
    assert (changed != text) == ("<!-- measured: " in text)
    assert written(changed) == text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_a_mark_in_prose_begins_no_line_for_then_markdown_takes_it_for_html(page):
    assert re.findall(r"^ *(?:- )?<!-- measured: .+? -->.+", page.read_text(), re.M) == []


_QUANTITY = (
    r"\d[\d.,]*(?: to [\d.,]+)? (?:%|ms\b|seconds\b|[MG]B\b|times\b|points\b)|\d ± \d|\d\.\d+x|(?<!\w)[+-]\d+\.\d+"
)
_NO_MEASUREMENT = {
    "README.md": ["95 %"],  # intervals
    "docs/comparison.md": ["4.5 %"],  # what headers take of packets
    # a target, others' runs, an assumption, how near, examples, and code
    "docs/planning.md": ["5 %", "90 %", "1 GB", "10 %", "20 %", "95 %", "-1.4", "-5.3", "6, seconds"],
    "docs/choosing.md": ["400 MB", "150 ms", "320 ms", "80 ms", "166 ms", "1.25 GB", "5 %", "4.5 %", "95 %"],
    "docs/unequal-machines.md": ["10 %"],  # a default
    "docs/papers.md": [  # intervals; the papers' own claims; what is arithmetic, and what the model assumes
        *(
            "95 %",
            "1.1 to 3 times",
            "73.65 to 73.70 %",
            "110 %",
            "25 %",
            "35 %",
            "75 ms",
            "1 to 11 points",
            "8 to 12 times",
        ),
        "8 times",
    ],
}


@pytest.mark.parametrize("name", _NO_MEASUREMENT)
def test_a_measured_number_outside_of_marks_is_found(name):
    prose = without_marked((CHECKOUT / name).read_text())
    assert set(re.findall(_QUANTITY, prose)) == set(_NO_MEASUREMENT[name])


def test_a_mark_without_a_result_is_an_error():
    with pytest.raises(KeyError):
        written("<!-- measured: tuned / nodes-8 / Nobody -->1.0<!-- end -->")
    assert documents.without_marked("a <!-- measured: x -->1.0<!-- end --> b") == "a  b"
