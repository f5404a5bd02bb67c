"""The documentation uses the field's words, and short sentences; the package uses fewer words of the old dialect."""

from __future__ import annotations

import importlib.util
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE_CEILING = 4  # words of the dialect in docstrings and messages of the package; lower it when they become fewer


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


def test_vocabulary_is_a_sorted_dictionary_of_codespell(prose):
    lines = prose.VOCABULARY.read_text().splitlines()
    assert lines == sorted(lines, key=lambda line: line.partition("->")[0])
    assert [line for line in lines if not re.fullmatch(r"[a-z]+->[^,]+(,|, [^,]+,)?", line)] == []


def test_codespell_finds_a_word_of_the_dialect(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Nodes meet on a lane.\n")
    command = [
        sys.executable,
        "-m",
        "codespell_lib",
        "--dictionary",
        str(CHECKOUT / "tools" / "vocabulary.txt"),
        str(page),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode
    assert "lane ==> inter-node process group" in found.stdout


@pytest.mark.parametrize(
    ("subject", "wrong"),
    [
        ("elastic: roll back outer momentum on failed vote\n\nBecause", None),
        ("x" * 73, "the subject has 73 characters; at most 72, in the imperative"),
        ("Add a test.", "the subject ends in a full stop; leave it out"),
    ],
    ids=["good", "long", "stop"],
)
def test_subject_of_a_commit_is_checked(prose, subject, wrong):
    assert prose.check_subject(subject) == wrong


def test_documentation_is_short(prose):
    assert sum(page.stat().st_size for page in prose.sources("docs")) <= 120_000


def test_sentences_are_short(prose):
    lengths = sorted(prose.lengths(prose.sources("docs")))
    assert statistics.median(lengths) <= 16
    assert lengths[round(0.95 * (len(lengths) - 1))] <= 30


def test_names_of_tests_are_short_statements(prose):
    assert [each for each in prose.test_names() if len(each) > 70 or each.startswith(("test_so_", "test_it_"))] == []
