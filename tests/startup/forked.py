"""Programs in processes that have imported Lightning already, for tests that are not about how Python starts.

The first one starts multiprocessing's fork server, which imports preloaded.py; each is a fork of that. So it costs
milliseconds instead of seconds, and gets nothing from the process of the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["preloaded"])


class ForkedPython:
    """``python *arguments`` in a fork: a script, ``-m module`` or ``-c program``; with what the tests need of Popen.

    Args:
        arguments: What would follow ``python`` on the command line.
        environment: All of its environment variables.
        output: The file that gets all that it prints; default: the tests' own output.
        folder: Where it runs; default: where the tests do.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        environment: Mapping[str, str],
        output: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self._output = output
        command = [*map(str, arguments)]
        self._process = _server.Process(target=_run, args=(command, dict(environment), output, folder or Path.cwd()))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if timeout is not None and self._process.is_alive():
            raise subprocess.TimeoutExpired("forked python", timeout)

    def terminate(self) -> None:
        self._process.terminate()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self._output.read_text() if self._output else "", None

    @property
    def returncode(self) -> int | None:
        return self.poll()


def _run(arguments: Sequence[str], environment: Mapping[str, str], output: Path | None, folder: Path) -> None:
    os.setsid()
    if output is not None:
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = [*arguments]
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
