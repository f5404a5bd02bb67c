"""Numbers in documents come from files."""

from __future__ import annotations

import re

import pytest

from benchmarks import documents
from benchmarks.documents import CHECKOUT, PAGES, without_marked, written


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_a_page_says_what_is_stored(page):
    assert page.read_text() == written(page.read_text()), "python -m benchmarks documents"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_a_changed_digit_is_found(page):
    text = page.read_text()
    marks = [found.start(1) for found in re.finditer(r"<!-- measured: [^>]+ -->[^<]*?(\d)", text)]
    for place in marks:
        changed = text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]
        assert changed != text == written(changed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_a_mark_in_prose_begins_no_line_for_then_markdown_takes_it_for_html(page):
    assert re.findall(r"^ *(?:- )?<!-- measured: .+? -->.+", page.read_text(), re.M) == []


@pytest.mark.parametrize("name", ["docs/papers.md", "docs/choosing.md", "docs/unequal-machines.md"])
def test_a_measured_number_outside_of_marks_is_found(name):
    prose = without_marked((CHECKOUT / name).read_text())
    assert re.findall(r"\d ± \d|[+-]\d+\.\d", prose) == []


def test_a_mark_without_a_result_is_an_error():
    with pytest.raises(KeyError):
        written("<!-- measured: tuned / nodes-8 / Nobody -->1.0<!-- end -->")
    assert documents.without_marked("a <!-- measured: x -->1.0<!-- end --> b") == "a  b"
