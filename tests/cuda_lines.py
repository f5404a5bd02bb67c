"""Which lines of the package need CUDA, and which test reaches each: ``python -m tests.cuda_lines [for pytest]``.

On a machine without a GPU these are the tests in which ``pretended_streams.py`` plays one; with one, give ``-m gpu``
and the folders of tests. A line counts that names ``torch.cuda`` or calls ``comm/streams.py``; ``-`` says that no test
got there. ``--variants`` counts the tests that run on a GPU as well, by room, and runs none.

The package is compiled with a note before every statement of such a line, so the rest costs nothing.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_hiercomm"
NEEDS_CUDA = re.compile(
    r"torch\.cuda\.\w+\(|\bstreams\.(?!has\b|check_known\b)\w+\(|wait_event\(|wait_stream\(|\.record_stream\("
)
PRETENDED = [
    "tests/schemes/test_streams.py",
    "tests/schemes/health/test_nonfinite.py",
    "tests/comm/test_staged.py",
    "tests/comm/test_torch.py",
    "tests/comm/test_streams.py",
    "tests/comm/test_background.py",
    "tests/comm/test_mpi.py",
    "tests/elastic/test_groups.py",
    "tests/run/test_sharded_gradients.py",
    "tests/batches/test_heterogeneous.py",
    "tests/batches/test_speed.py",
    "tests/checkpoints/test_companion.py",
    "tests/planning/measure/test_doctor.py",
    "tests/planning/measure/test_ranks.py",
    "tests/planning/measure/test_steps.py",
    "tests/planning/measure/test_stopwatch.py",
    "tests/schemes/test_tuning.py",
]


def lines_that_need_cuda(path: Path) -> dict[int, str]:
    """The numbers and the text of such lines of a file, but for comments, docstrings and annotations."""
    found: dict[int, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        code = line.partition("#")[0]
        if NEEDS_CUDA.search(code) and not code.lstrip().startswith(("def ", "class ", '"')) and "``" not in code:
            found[number] = code.strip()
    return found


class Noting(ast.NodeTransformer):
    """Puts ``__reached__(place)`` before every statement of which a wanted line is a part.

    Args:
        file: Of which the lines are.
        wanted: Their numbers.
    """

    def __init__(self, file: str, wanted: dict[int, str]) -> None:
        self._file, self._wanted = file, wanted

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, [new for statement in statements for new in self._noted(statement)])
        return node

    def _noted(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        inside = getattr(statement, "body", None)  # of a statement that holds others, the head counts
        end = inside[0].lineno - 1 if inside else statement.end_lineno or statement.lineno
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            for number in range(statement.lineno, end + 1):
                if number in self._wanted:
                    call = ast.parse(f"__reached__({self._file!r}, {number})").body[0]
                    yield ast.copy_location(call, statement)
        yield statement


class Finder(importlib.abc.MetaPathFinder):
    """Compiles the package's own modules so."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or not name.startswith("lightning_hiercomm") or spec.origin is None:
            return None
        if Path(spec.origin).is_relative_to(PACKAGE) and lines_that_need_cuda(Path(spec.origin)):
            spec.loader = Loader(name, spec.origin)
        return spec


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)  # nothing that was stored without the notes

    def source_to_code(self, data: Any, path: Any, **_: Any) -> Any:  # type: ignore[override]
        wanted = lines_that_need_cuda(Path(path))
        tree = Noting(str(Path(path).relative_to(PACKAGE)), wanted).visit(ast.parse(data))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class Reached:
    """A plugin that keeps the first test that got to each line.

    Attributes:
        by: By file and number, the test.
    """

    def __init__(self) -> None:
        self._test = "the import"
        self.by: dict[tuple[str, int], str] = {}
        builtins.__reached__ = self._reached  # type: ignore[attr-defined]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._test = item.nodeid
        return (yield)

    def _reached(self, file: str, number: int) -> None:
        self.by.setdefault((file, number), self._test)


class Variants:
    """A plugin that counts the tests that are marked ``gpu``, by folder, and those of them that also run on the CPU."""

    def __init__(self) -> None:
        self.on_gpu: Counter[str] = Counter()
        self.on_both: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names = {item.nodeid for item in items}
        for item in items:
            if item.get_closest_marker("gpu"):
                room = "/".join(item.nodeid.partition("::")[0].split("/")[1:-1]) or "."
                self.on_gpu[room] += 1
                self.on_both[room] += any(
                    here in item.nodeid and item.nodeid.replace(here, there) in names
                    for here, there in (("[cuda-", "[cpu-"), ("[cuda]", "[cpu]"), (", gpu", ""))
                )

    def table(self) -> str:
        rows = [f"| {room} | {count} | {self.on_both[room]} |" for room, count in sorted(self.on_gpu.items())]
        head = ["| tests of | run on a GPU | of these on the CPU, too |", "|---|--:|--:|"]
        return "\n".join([*head, *rows, f"| all | {self.on_gpu.total()} | {self.on_both.total()} |"])


def listing(reached: dict[tuple[str, int], str]) -> str:
    """A line for each line that needs CUDA."""
    said, count = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        file = str(path.relative_to(PACKAGE))
        for number, code in lines_that_need_cuda(path).items():
            count += 1
            said.append(f"{f'{file}:{number}':<40} {code[:60]:<60} {reached.get((file, number), '-')}")
    return "\n".join([*said, f"{len(reached)} of {count} lines that need CUDA were reached"])


def main() -> None:
    given = sys.argv[1:]
    if "--variants" in given:
        variants = Variants()
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            pytest.main(["-q", "--collect-only", *given[1:]], [variants])
        print(variants.table())
        return
    reached = Reached()
    sys.meta_path.insert(0, Finder())
    pytest.main(["-q", "-p", "no:cacheprovider", *(given or PRETENDED)], [reached])
    print(listing(reached.by))


if __name__ == "__main__":
    main()
