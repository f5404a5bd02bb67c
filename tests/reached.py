"""Which tests execute which lines of the core, in how many seconds: what ``tests.mutants`` chooses tests by.

``python -m tests.reached --keep reached.json``, in a checkout, in an environment with ``coverage``, runs the tests of
the core once, with the nightly cells: on threads, in one process, and in forked ranks that end as usual. What programs
execute that tests start is not seen.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing.util
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lightning_hiercomm"
TESTS = (
    *("tests/schemes", "tests/comm", "tests/batches", "tests/nodes"),
    *("tests/test_combinations.py", "tests/test_arguments.py", "tests/checkpoints", "tests/run"),
)


class Recorder:
    """A plugin of pytest.

    Attributes:
        tests: By name: ``seconds`` of processors, whether it is left to the ``night``, and whether it ``forks``.
        lines: By file of the package, line and test: those that ran while the test did.
    """

    def __init__(self, kept: Path) -> None:
        import coverage

        self._kept = kept
        self._last = time.monotonic()
        self.tests: dict[str, dict[str, Any]] = {}
        self.lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._failed: set[str] = set()
        self._test = ""
        self._folder = Path(tempfile.mkdtemp(prefix="reached-"))
        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=[f"{ROOT / PACKAGE}/*"])
        multiprocessing.util.register_after_fork(self, Recorder._in_a_rank)

    def __enter__(self) -> Recorder:
        self._coverage.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._coverage.stop()
        self.keep()

    def keep(self) -> None:
        """Write what is known."""
        data = self._coverage.get_data()
        for path in data.measured_files():
            for line, tests in data.contexts_by_lineno(path).items():
                self._add(path, line, [test for test in tests if test])
        names = {name: number for number, name in enumerate(self.tests)}
        lines = {
            file: {
                line: sorted(names[test] for test in tests if test in names) for line, tests in sorted(found.items())
            }
            for file, found in sorted(self.lines.items())
        }
        whole = self._kept.with_suffix(".part")
        whole.write_text(json.dumps({"tests": self.tests, "lines": lines}))
        whole.rename(self._kept)
        self._last = time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.get_closest_marker("nightly") is not None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._test = item.nodeid
        self._coverage.switch_context(item.nodeid)
        began = _processor_seconds()
        try:
            return (yield)
        finally:
            written = [*self._folder.iterdir()]
            for path in written:
                for file, lines in json.loads(path.read_text()).items():
                    for line in lines:
                        self._add(file, line, [item.nodeid])
                path.unlink()
            if item.nodeid not in self._failed:  # what fails without a mutant says nothing about one
                night = item.get_closest_marker("nightly") is not None
                seconds = round(_processor_seconds() - began, 3)
                self.tests[item.nodeid] = {"seconds": seconds, "night": night, "forks": bool(written)}
            if time.monotonic() - self._last > 240:
                self.keep()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)

    def _add(self, path: str, line: int, tests: Sequence[str]) -> None:
        self.lines[str(Path(path).relative_to(ROOT / PACKAGE))][line].update(tests)

    def _in_a_rank(self) -> None:
        """A database cannot be shared with a fork: take what the tracer noted, when the rank ends."""
        noted = self._coverage._collector.data  # type: ignore[union-attr]
        noted.clear()

        def keep() -> None:
            lines = {path: [*found] for path, found in noted.items() if path.startswith(str(ROOT / PACKAGE))}
            whole = self._folder.with_suffix(f".{os.getpid()}")
            whole.write_text(json.dumps(lines))
            whole.rename(self._folder / str(os.getpid()))

        multiprocessing.util.Finalize(None, keep, exitpriority=0)


def _processor_seconds() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="*", default=TESTS)
    parser.add_argument("--stage", choices=("day", "night"), help="default: both")
    parser.add_argument("--keep", type=Path, default=Path("reached.json"))
    arguments = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)
    quietly = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not openmpi and not mpich")
    stages = {"day": ["-m", "not nightly"], "night": ["-m", "nightly"]}.get(arguments.stage, [])
    with Recorder(arguments.keep.absolute()) as recorder:
        pytest.main(["--nightly", *quietly, *stages, *arguments.tests], plugins=[recorder])


if __name__ == "__main__":
    main()
