"""What the tests would notice: small changes of the core, one at a time, and whether a test fails.

``python -m tests.reached --keep reached.json`` and ``python -m tests.mutants --reached reached.json --sample 300 --seed
1 --keep mutants.json``, in a checkout, in an environment with ``mutmut`` and ``coverage``. The operators are mutmut's,
but for those of strings, which change messages. Every mutant meets, until one kills it,

- ``day``: the tests of `make test` that execute its line,
- ``night``: the cells that only the nightly job runs and that execute it. What these kill is what covering sets lose,
- ``now``, if asked for: ``day`` again, after tests were written and ``tests.reached`` knows them. A mutant of which the
  kept file says why it is ``equivalent``, a change of nothing that anybody sees, is left out.

One cell of every test function comes first, the shortest, then a second of each, up to ``--limit`` processor seconds a
stage; fits on forked ranks where no other test executes the line, or with ``--fits``, at last. Tests are collected
once; a mutant is a fork in which a function has other code. What runs while the package is imported, and what no test
was seen to execute, is tried on a copy of the package, by the tests of its function, or else of its file. A call with
the same ``--keep`` goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import inspect
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.reached import PACKAGE, ROOT, TESTS

CORE = ("schemes", "comm", "batches", "checkpoints")
ELSEWHERE = ("comm/streams.py", "comm/mpi.py")
"""Which a machine without GPU cannot run, and which needs a launch for every mutant."""
APART = {"comm/torch.py": "gloo", "comm/shared_memory.py": "shared-memory"}
"""Whose tests run in processes that ``tests.reached`` does not see: the conformance suite over such a carrier."""
STAGES = ("day", "night", "now")
QUIETLY = ("--nightly", "-q", "-s", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=240")

Mutant = dict[str, Any]


def mutants() -> Iterator[Mutant]:
    """All of the core: where, and what becomes of it."""
    import libcst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation.mutators import mutation_operators, operator_string

    operators = [(kind, operator) for kind, operator in mutation_operators if operator is not operator_string]
    skipped = (libcst.Annotation, libcst.Decorator, libcst.Import, libcst.ImportFrom, libcst.Raise, libcst.BaseString)
    for path in sorted(path for part in CORE for path in (ROOT / PACKAGE / part).rglob("*.py")):
        name = str(path.relative_to(ROOT / PACKAGE))
        if name in ELSEWHERE:
            continue
        wrapper = MetadataWrapper(libcst.parse_module(path.read_text()))
        positions = wrapper.resolve(PositionProvider)
        nodes: list[tuple[libcst.CSTNode, tuple[int, int]]] = [(wrapper.module, (1, sys.maxsize))]
        while nodes:
            node, around = nodes.pop()
            if isinstance(node, skipped):
                continue
            place = positions.get(node)
            if isinstance(node, libcst.FunctionDef):
                around = (place.start.line, place.end.line)
            nodes.extend((child, around) for child in reversed(node.children))
            for kind, operator in operators:
                if not isinstance(node, kind):
                    continue
                for mutated in operator(node):  # type: ignore[operator]
                    if wrapper.module.code_for_node(mutated) != wrapper.module.code_for_node(node):
                        made = {"file": name, "line": place.start.line, "operator": operator.__name__}
                        yield {**made, "function": around, "change": (wrapper.module, node, mutated)}


def drawn(number: int, seed: int) -> list[Mutant]:
    """So many of them, in a random order, with the line before and after."""
    everything = [*mutants()]
    chosen = random.Random(seed).sample(everything, min(number, len(everything)))
    for mutant in chosen:
        module, node, mutated = mutant.pop("change")
        mutant["text"] = module.deep_replace(node, mutated).code
        before = (ROOT / PACKAGE / mutant["file"]).read_text().splitlines()
        after = mutant["text"].splitlines()
        changed = [pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]]
        mutant["before"], mutant["after"] = (line.strip() for line in changed[0]) if changed else ("", "")
    print(f"{len(chosen)} of {len(everything)} mutants")
    return chosen


class Reached:
    """What ``tests.reached`` found."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self._lines: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for found in (json.loads(path.read_text()) for path in paths):
            names = [*found["tests"]]
            self.tests.update(found["tests"])
            for file, lines in found["lines"].items():
                for line, numbers in lines.items():
                    self._lines[file][int(line)] += [names[number] for number in numbers]

    def at(self, file: str, lines: Iterable[int]) -> list[str]:
        """The tests that execute any of these lines."""
        return [*dict.fromkeys(test for line in lines for test in self._lines[file].get(line, []))]

    def of(self, mutant: Mutant, fits: bool) -> tuple[list[str], bool]:
        """The tests for it, and whether they execute its line; those that fork if no others do, or if asked for."""
        file, (first, last) = mutant["file"], mutant["function"]
        if tests := self.at(file, [mutant["line"]]):
            return [test for test in tests if fits or not self.tests[test]["forks"]] or tests, True
        lines = [*self._lines[file]]
        return self.at(file, [line for line in lines if first <= line <= last]) or self.at(file, lines), False

    def over(self, carrier: str) -> list[str]:
        """The conformance suite of communicators over this carrier."""
        return [test for test in self.tests if "comm/test_communicator" in test and carrier in test.partition("[")[2]]

    def chosen(self, tests: Sequence[str], stage: str, limit: float) -> list[str]:
        """Those of a stage, one of every function before a second of any, in ``limit`` seconds."""
        functions: dict[str, list[str]] = defaultdict(list)
        for test in tests:
            if self.tests[test]["night"] == (stage == "night"):
                functions[test.partition("[")[0]].append(test)
        places = {}
        for name, cells in functions.items():
            cells.sort(key=lambda cell: self.tests[cell]["seconds"])
            cells[1:] = random.Random(name).sample(cells[1:], len(cells) - 1)
            places.update({cell: place for place, cell in enumerate(cells)})
        forks, seconds = ({test: self.tests[test][what] for test in places} for what in ("forks", "seconds"))
        ordered = sorted(places, key=lambda test: (forks[test], places[test], seconds[test]))
        left = limit
        taken = []
        for test in ordered:
            if (left := left - seconds[test]) < 0:
                break
            taken.append(test)
        return taken


class Mutated:
    """A plugin of pytest that tries mutants in forks, in place of running tests."""

    def __init__(self, sample: Sequence[Mutant], reached: Reached, arguments: argparse.Namespace) -> None:
        self._sample = sample
        self._reached = reached
        self._arguments = arguments
        self._failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        gc.unfreeze()
        self._functions = [each for each in gc.get_objects() if isinstance(each, FunctionType)]
        gc.freeze()
        began = time.monotonic()
        for stage in self._arguments.stages:
            before = ("day",) if stage != "day" else ()
            todo = [mutant for mutant in self._sample if all(mutant.get(each) == "survived" for each in before)]

            def one(mutant: Mutant, stage: str = stage) -> None:
                done = stage in mutant or (stage == "now" and "equivalent" in mutant)
                if done or time.monotonic() - began > self._arguments.seconds:
                    return
                tests, exactly = self._reached.of(mutant, self._arguments.fits)
                taken = self._reached.chosen(tests, stage, self._arguments.limit)
                mutant[stage], mutant["by"] = self._tried(mutant, taken, exactly) if taken else ("survived", "")
                if mutant[stage] == "survived" and stage != "night" and mutant["file"] in APART:
                    suite = self._reached.over(APART[mutant["file"]])
                    taken = self._reached.chosen(suite, stage, self._arguments.limit)
                    mutant[stage], mutant["by"] = self._tried(mutant, taken, False)
                mutant["reached"] = exactly
                mutant[f"{stage}_tests"] = len(taken)
                change = f"{mutant['before']}  ->  {mutant['after']}"
                print(f"{mutant[stage]:8} {stage:5} {mutant['file']}:{mutant['line']}  {change}", flush=True)
                keep(self._arguments.keep, self._sample)

            with ThreadPoolExecutor(self._arguments.jobs) as threads:
                [*threads.map(one, todo)]
        return True

    def _tried(self, mutant: Mutant, tests: Sequence[str], exactly: bool) -> tuple[str, str]:
        changed = other_code(ROOT / PACKAGE / mutant["file"], mutant["text"]) if exactly else None
        here = [test for test in tests if changed is not None and not self._reached.tests[test]["forks"]]
        elsewhere = [test for test in tests if test not in here]  # ranks are forks of a server, which has not changed
        with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
            fate = self._forked(Path(folder), changed, here) if changed is not None and here else "survived"
            if fate != "survived" or not elsewhere:
                return fate, _said(Path(folder))
        fate, by = self._on_a_copy(mutant["file"], mutant["text"], elsewhere)
        unchanged = (ROOT / PACKAGE / mutant["file"]).read_text()
        if (
            by
            and self._reached.tests[by]["forks"]
            and self._on_a_copy(mutant["file"], unchanged, [by])[0] != "survived"
        ):
            print(f"without a mutant, too, there failed {by}", flush=True)  # on a busy machine, after a time limit
            return self._tried(mutant, [test for test in elsewhere if test != by], False)
        return fate, by

    def _on_a_copy(self, file: str, text: str, tests: Sequence[str]) -> tuple[str, str]:
        with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
            fate = _ended(_copied(Path(folder), file, text, tests), 120 + 10 * self._arguments.limit)
            return fate, _said(Path(folder))

    def _forked(self, folder: Path, changed: dict[CodeType, CodeType], tests: Sequence[str]) -> str:
        child = os.fork()
        if child == 0:
            self._in_a_fork(folder, changed, [self._items[test] for test in tests])
        return _ended(child, 60 + 10 * self._arguments.limit)

    def _in_a_fork(self, folder: Path, changed: dict[CodeType, CodeType], items: Sequence[pytest.Item]) -> None:
        code = 1
        try:
            os.setsid()
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
            for function in self._functions:
                if (other := changed.get(function.__code__)) is not None:
                    function.__code__ = other
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self._failed:
                    (folder / "said").write_text(self._failed)
                    os._exit(1)
            code = 0
        finally:
            os._exit(code)


def other_code(path: Path, text: str) -> dict[CodeType, CodeType] | None:
    """The code of the file's functions that is another in ``text``; None if other code runs at the import."""
    pairs = [(compile(path.read_text(), str(path), "exec"), compile(text, str(path), "exec"))]
    changed = {}
    while pairs:
        before, after = pairs.pop()
        inner = [[const for const in code.co_consts if isinstance(const, CodeType)] for code in (before, after)]
        if before.co_flags & inspect.CO_OPTIMIZED:  # of a function
            at_once = "<locals>" not in before.co_qualname
            if at_once and before.co_name.endswith(("comp>", "expr>")) and before != after:
                return None
            if before != after and before.co_freevars == after.co_freevars:
                changed[before] = after
            elif at_once and before != after:
                return None  # what is inside of a function comes with it
        elif _bare(before) != _bare(after) or len(inner[0]) != len(inner[1]):
            return None
        pairs.extend(zip(*inner, strict=False))
    return changed or None


def _bare(code: CodeType) -> tuple[object, ...]:
    return code.co_code, code.co_names, [repr(const) for const in code.co_consts if not isinstance(const, CodeType)]


def _said(folder: Path) -> str:
    """Which test failed."""
    said = folder / "said"
    return said.read_text() if said.exists() else ""


def _copied(folder: Path, file: str, text: str, tests: Sequence[str]) -> int:
    """Start the tests in another program, on a copy of the package."""
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / PACKAGE / file).write_text(text)
    (folder / "tests.json").write_text(json.dumps([*tests]))
    child = os.fork()
    if child == 0:
        os.setsid()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        command = [sys.executable, "-m", "tests.mutants", "--copy", str(folder)]
        # nobody is to find the checkout's package first, where it runs: a fork server would
        paths = {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
        os.execve(sys.executable, command, {**os.environ, **paths})
    return child


class _Only:
    """A plugin of pytest: these tests, in this order; it writes down which one failed."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._names = names
        self._said = folder / "said"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._said.write_text(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        named = {item.nodeid: item for item in items}
        items[:] = [named[name] for name in self._names]


def _run_on_copy(folder: Path) -> int:
    sys.path.insert(0, str(folder))
    names = json.loads((folder / "tests.json").read_text())
    return int(
        pytest.main([*QUIETLY, *sorted({name.partition("::")[0] for name in names})], plugins=[_Only(names, folder)])
    )


def _ended(child: int, seconds: float) -> str:
    """``killed``, ``hung`` or ``survived``."""
    deadline = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hung"
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it left
    return "survived" if os.waitstatus_to_exitcode(ended[1]) == 0 else "killed"


def keep(path: Path, sample: Sequence[Mutant]) -> None:
    """Write all but the mutants' texts."""
    kept = [{name: value for name, value in mutant.items() if name != "text"} for mutant in sample]
    path.write_text(json.dumps(kept, indent=0))


def page(sample: Sequence[Mutant]) -> str:
    """Markdown: by part of the core, how many were killed by what; then those that were not killed at first."""
    lines = [
        "| part | mutants | killed by everything | by `make test` | by `make test` now | equivalent | left |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    parts: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in sample:
        if "day" in mutant:
            parts[mutant["file"].split("/")[0]].append(mutant)
            parts["all"].append(mutant)
    for part in sorted(parts, key=lambda part: (part == "all", part)):
        total = len(parts[part])
        day = [mutant for mutant in parts[part] if _is_killed(mutant, "day")]
        all_day = [mutant for mutant in parts[part] if _is_killed(mutant, "day", "night")]
        now = [mutant for mutant in parts[part] if _is_killed(mutant, "day", "now")]
        equivalent = [mutant for mutant in parts[part] if "equivalent" in mutant]
        shares = [f"{len(each)} ({len(each) / total:.1%})" for each in (all_day, day, now)]
        if not any("night" in mutant for mutant in sample):
            shares[0] = "not tried"
        left = total - len(now) - len(equivalent)
        lines.append(f"| {part} | {total} | {' | '.join(shares)} | {len(equivalent)} | {left} |")
    lines += ["", "| mutant | killed at night | killed now | why not |", "|---|---|---|---|"]
    for mutant in sorted(sample, key=lambda mutant: (mutant["file"], mutant["line"])):
        if mutant.get("day") == "survived":
            change = f"`{mutant['before']}` became `{mutant['after']}`".replace("|", "\\|")
            night, now = ("yes" if _is_killed(mutant, stage) else "" for stage in ("night", "now"))
            why = f"equivalent: {mutant['equivalent']}" if "equivalent" in mutant else mutant.get("left", "")
            lines.append(f"| {mutant['file']}:{mutant['line']}: {change} | {night} | {now} | {why} |")
    return "\n".join(lines)


def _is_killed(mutant: Mutant, *stages: str) -> bool:
    return any(mutant.get(stage) in ("killed", "hung") for stage in stages)


def _key(mutant: Mutant) -> tuple[object, ...]:
    return mutant["file"], mutant["line"], mutant["operator"], mutant["after"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reached", type=Path, nargs="+", default=[Path("reached.json")])
    parser.add_argument("--limit", type=float, default=60, help="processor seconds of tests for a mutant in a stage")
    parser.add_argument("--fits", action="store_true", help="on forked ranks, where others execute the line, too")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so many")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=["day", "night"])
    parser.add_argument("--keep", type=Path, default=Path("mutants.json"))
    parser.add_argument("--page", action="store_true", help="only print what the kept file says")
    parser.add_argument("--copy", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.copy:
        sys.exit(_run_on_copy(arguments.copy))
    kept = json.loads(arguments.keep.read_text()) if arguments.keep.exists() else []
    if arguments.page:
        print(page(kept))
        return
    known = {_key(mutant): mutant for mutant in kept}
    sample = [{**mutant, **known.get(_key(mutant), {})} for mutant in drawn(arguments.sample, arguments.seed)]
    arguments.keep = arguments.keep.absolute()
    reached = Reached(arguments.reached)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    importlib.import_module("torch").set_num_threads(1)
    pytest.main([*QUIETLY, *TESTS], plugins=[Mutated(sample, reached, arguments)])
    print(page(sample))


if __name__ == "__main__":
    main()
