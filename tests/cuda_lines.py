"""Which lines of the package need CUDA, and which test reaches each: ``python -m tests.cuda_lines [for pytest]``.

On a machine without a GPU these are the tests in which ``pretended_streams.py`` plays one; with one, give ``-m gpu``.
A line counts that names ``torch.cuda`` or CUDA tensors, or that calls ``comm/streams.py``; ``-`` says that no test got
there.
"""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_hiercomm"
NEEDS_CUDA = re.compile(
    r"torch\.cuda\.\w+\(|\bstreams\.(?!has\b)\w+\(|\.is_cuda\b|wait_event|wait_stream|\.synchronize\("
)
PRETENDED = [
    "tests/schemes/test_streams.py",
    "tests/schemes/health/test_nonfinite.py",
    "tests/comm/test_staged.py",
    "tests/comm/test_torch.py",
]


def lines_that_need_cuda() -> dict[str, dict[int, str]]:
    """By file, the numbers and the text of such lines, but for comments and annotations."""
    found: dict[str, dict[int, str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            code = line.partition("#")[0]
            if NEEDS_CUDA.search(code) and not code.lstrip().startswith(("def ", "class ", '"')) and "``" not in code:
                found.setdefault(str(path), {})[number] = code.strip()
    return found


class Tracing:
    """A plugin that notes the first test that gets to a line.

    Args:
        lines: See :func:`lines_that_need_cuda`.

    Attributes:
        reached: By file and number, the test.
    """

    def __init__(self, lines: dict[str, dict[int, str]]) -> None:
        self._lines = lines
        self._wanted: dict[CodeType, bool] = {}
        self._test = ""
        self.reached: dict[tuple[str, int], str] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        self._test = item.nodeid
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code not in self._wanted:
            lines = self._lines.get(code.co_filename, {})
            self._wanted[code] = any(number in lines for _, _, number in code.co_lines())
        return self._reached if self._wanted[code] else None

    def _reached(self, frame: FrameType, event: str, argument: object) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if place not in self.reached and frame.f_lineno in self._lines[place[0]]:
            self.reached[place] = self._test
        return self._reached


def main() -> None:
    lines = lines_that_need_cuda()
    tracing = Tracing(lines)
    pytest.main(["-q", "-p", "no:cacheprovider", *(sys.argv[1:] or PRETENDED)], [tracing])
    for path, numbers in lines.items():
        for number, code in numbers.items():
            where = f"{Path(path).relative_to(PACKAGE)}:{number}"
            print(f"{where:<40} {code[:60]:<60} {tracing.reached.get((path, number), '-')}")
    count = sum(map(len, lines.values()))
    print(f"{len(tracing.reached)} of {count} lines that need CUDA were reached")


if __name__ == "__main__":
    main()
