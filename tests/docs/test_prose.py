"""The documentation uses the field's words, and short sentences; the package uses fewer words of the old dialect."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE_CEILING = 136  # words of the dialect in docstrings and messages of the package; lower it when they become fewer


@pytest.fixture(scope="module")
def prose():
    spec = importlib.util.spec_from_file_location("prose", CHECKOUT / "tools" / "prose.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documentation_has_no_word_of_the_dialect(prose):
    assert prose.dialect_in_docs() == {}


def test_package_has_no_more_words_of_the_dialect(prose):
    assert prose.dialect_in_package() <= PACKAGE_CEILING


def test_documentation_is_short(prose):
    assert sum(page.stat().st_size for page in prose.sources("docs")) <= 120_000


def test_sentences_are_short(prose):
    lengths = sorted(prose.lengths(prose.sources("docs")))
    assert statistics.median(lengths) <= 16
    assert lengths[round(0.95 * (len(lengths) - 1))] <= 30


def test_words_are_found_in_names_and_phrases(prose):
    counts = prose.count_words("RunningAgreement lands in\nplace of a lane", ["agreement", "lane"], ["in place of"])
    assert counts == {"agreement": 1, "lane": 1, "in place of": 1}


def test_code_tables_and_targets_are_no_sentences(prose):
    page = "# Title\n\nIt sends [bytes](https://example.org/a.b). Nodes wait.\n\n```\nNo. Code.\n```\n| a. B | c |"
    assert prose.sentences(page) == ["It sends bytes.", "Nodes wait."]


def test_docstrings_and_messages_are_told_apart(prose, tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""A module."""\nraise ValueError("a message")\n')
    assert list(prose.docstrings(path)) == [("module", "A module.")]
    assert list(prose.messages(path)) == ["a message"]


@pytest.mark.parametrize("subject", ["Add a thing", "elastic: roll back outer momentum on failed vote"])
def test_short_commit_subjects_pass(prose, subject):
    assert prose.check_subject(f"{subject}\n\nA longer text.") is None


@pytest.mark.parametrize("subject", ["a" * 73, "Add a thing."])
def test_long_or_punctuated_commit_subjects_fail(prose, subject):
    assert prose.check_subject(subject)
