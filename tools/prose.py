"""Count what makes our prose hard to read: `python tools/prose.py`.

Prints, for the package, the documentation, the tests and the programs (benchmarks, tools and examples), how often words
of a private dialect occur; the size of the Markdown; the words per sentence in the documentation; and very short
docstrings and long names of tests.
`tests/docs/test_prose.py` fails where a count rises.

pre-commit and `make test` check the words in Markdown by `codespell --dictionary tools/vocabulary.txt`. This program
checks docstrings and messages, which codespell does not tell from code, and phrases. Other linters fit less: vale's
package downloads a program from GitHub when it first runs, and proselint takes no rules of a project.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]

VOCABULARY = CHECKOUT / "tools" / "vocabulary.txt"
DIALECT = [line.partition("->")[0] for line in VOCABULARY.read_text().splitlines()]
"""Words of the private dialect with one meaning. codespell reads the same file, and says what to write instead."""

PHRASES = ("but for", "in place of", "once more", "as ever", "of which", "be it")
AMBIGUOUS = (
    "care draw draws handle handles house land lands life look looks mark marks move moves part parts patient"
    " piece pieces room section segment segments sentence share shares way word"
)
"""Words of the dialect that also are plain English or terms of the field: counted, not refused."""
MARKDOWN_OUTSIDE_DOCS = ("README.md", "CONTRIBUTING.md")
SUBJECT_LENGTH = 72


def sources(area: str) -> list[Path]:
    """Return the files of ``package``, ``docs``, ``tests`` or ``programs``."""
    if area == "docs":
        pages = sorted((CHECKOUT / "docs").rglob("*.md"))
        outside = [CHECKOUT / name for name in MARKDOWN_OUTSIDE_DOCS]
        return [*outside, *(page for page in pages if not {"_build", "announce"} & {*page.parts})]
    folders = {"package": ["lightning_hiercomm"], "tests": ["tests"], "programs": ["benchmarks", "examples", "tools"]}
    paths = (path for folder in folders[area] for path in (CHECKOUT / folder).rglob("*.py"))
    return sorted(path for path in paths if "__pycache__" not in path.parts)


def count_words(text: str, words: Iterable[str], phrases: Iterable[str] = ()) -> Counter[str]:
    """Count whole words. Parts of names (``RunningAgreement``, ``land_late``) are words."""
    split = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower()
    found = Counter(re.findall(r"(?<![a-z])[a-z]+(?![a-z])", split))
    counts = Counter({word: found[word] for word in words if found[word]})
    for phrase in phrases:
        if hits := len(re.findall(rf"\b{phrase.replace(' ', chr(92) + 's+')}\b", split)):
            counts[phrase] = hits
    return counts


def prose(page: str) -> str:
    """Return the running text of a Markdown page: no code, tables, directives, headings and link targets."""
    page = re.sub(r"```.*?```|<!--.*?-->", "", page, flags=re.DOTALL)
    page = re.sub(r"\{\{.*?\}\}", "0", page)
    page = re.sub(r"^\s*(?:\||#|:::|\{|\(|!\[|---).*$", "", page, flags=re.MULTILINE)
    page = re.sub(r"\{[\w:]+\}`([^`]*)`", r"\1", page)
    page = re.sub(r"`[^`]*`", "code", page)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)


def readable(page: str) -> str:
    """Return the text of a Markdown page with its tables and headings, without code and link targets."""
    page = re.sub(r"```.*?```|<!--.*?-->|\{\{.*?\}\}|`[^`]*`", " ", page, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", " ", page)


def sentences(page: str) -> list[str]:
    """Return the sentences of a Markdown page; every item of a list ends one."""
    blocks = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s+", prose(page))
    found = (re.split(r"(?<=[.!?:])[\"')*]*\s+(?=[\"'(*A-Z0-9])", " ".join(block.split())) for block in blocks)
    return [text for block in found for text in block if len(re.findall(r"[A-Za-z]+", text)) > 1]


def lengths(pages: Iterable[Path]) -> list[int]:
    """Return the words of each sentence of some pages."""
    return [len(text.split()) for page in pages for text in sentences(page.read_text())]


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of everything in a module that has one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", path.stem), text


def messages(path: Path) -> Iterator[str]:
    """Yield the texts that a module may show to a person: its strings with a space in them, without docstrings."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden
        if is_text and " " in node.value.strip():
            yield node.value


def dialect_in_docs() -> dict[str, Counter[str]]:
    """Return the words of the dialect by page, for pages that have any."""
    found = {
        str(page.relative_to(CHECKOUT)): count_words(readable(page.read_text()), DIALECT, PHRASES)
        for page in sources("docs")
    }
    return {page: counts for page, counts in found.items() if counts}


def dialect_in_package() -> int:
    """Return how often words of the dialect occur in docstrings and messages of the package."""
    texts = [text for path in sources("package") for text in (*(text for _, text in docstrings(path)), *messages(path))]
    return count_words("\n".join(texts), DIALECT, PHRASES).total()


def test_names() -> list[str]:
    """Return the names of all test functions."""
    return re.findall(r"^\s*def (test_\w+)", "\n".join(path.read_text() for path in sources("tests")), re.MULTILINE)


def check_subject(message: str) -> str | None:
    """Return what is wrong with the first line of a commit's message."""
    subject = message.split("\n", 1)[0]
    if len(subject) > SUBJECT_LENGTH:
        return f"the subject has {len(subject)} characters; at most {SUBJECT_LENGTH}, in the imperative"
    return "the subject ends in a full stop; leave it out" if subject.endswith(".") else None


def check_subjects(commits: str) -> list[str]:
    """Return what is wrong with the subjects of a range of commits, such as ``origin/main..HEAD``."""
    command = ["git", "log", "--no-merges", "--format=%h %s", commits]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, cwd=CHECKOUT).stdout.splitlines()
    checked = ((line, check_subject(line.partition(" ")[2])) for line in lines)
    return [f"{line}: {wrong}" for line, wrong in checked if wrong]


def report(lists_words: bool) -> None:
    for area in ("package", "docs", "tests", "programs"):
        text = "\n".join(path.read_text() for path in sources(area))
        dialect = count_words(text, DIALECT, PHRASES)
        ambiguous = count_words(text, AMBIGUOUS.split()).total()
        print(f"{area:8} {dialect.total():6} words of the dialect, {ambiguous:6} that are also plain words")
        if lists_words:
            print("         " + ", ".join(f"{word} {count}" for word, count in dialect.most_common()))
    pages = sources("docs")
    words = sorted(lengths(pages))
    print(f"Markdown of docs, README and CONTRIBUTING: {sum(page.stat().st_size for page in pages) / 1000:.1f} KB")
    percentile = words[round(0.95 * (len(words) - 1))]
    print(f"words per sentence: median {statistics.median(words):.0f}, 95th percentile {percentile}, most {words[-1]}")
    texts = [text for path in sources("package") for _, text in docstrings(path)]
    print(f"docstrings of at most five words: {sum(len(text.split()) <= 5 for text in texts)} of {len(texts)}")
    names = test_names()
    print(f"tests: {len(names)}; names over 70 characters: {sum(len(name) > 70 for name in names)}", end="; ")
    print(f"that begin with test_so_ or test_it_: {sum(name.startswith(('test_so_', 'test_it_')) for name in names)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", action="store_true", help="list the words")
    parser.add_argument("--commit-subject", type=Path, metavar="FILE", help="check the message of a commit instead")
    parser.add_argument("--commit-subjects", metavar="RANGE", help="check those of origin/main..HEAD, say, instead")
    parser.add_argument("--check", action="store_true", help="fail if the documentation has a word of the dialect")
    arguments = parser.parse_args()
    if arguments.check:
        sys.exit("\n".join(f"{page}: {dict(counts)}" for page, counts in dialect_in_docs().items()) or None)
    if arguments.commit_subject:
        sys.exit(check_subject(arguments.commit_subject.read_text()))
    if arguments.commit_subjects:
        sys.exit("\n".join(check_subjects(arguments.commit_subjects)) or None)
    report(arguments.words)


if __name__ == "__main__":
    main()
