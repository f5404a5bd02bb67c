"""Programs in processes that have imported Lightning already, for tests that are not about how Python starts.

The first one starts multiprocessing's fork server, which imports preloaded.py; each is a fork of that. So it costs
milliseconds instead of seconds, and gets nothing from the process of the tests.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import multiprocessing
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["preloaded"])


def forking_workers() -> tuple[str, ...]:
    """Return the options with which torchrun forks its workers, too, if it then can keep its handlers from them."""
    from torch.distributed.run import get_args_parser

    has_option = "--signals-to-handle" in get_args_parser().format_help()  # newer versions of torch
    return ("--run-path", "--start-method", "fork", "--signals-to-handle", "SIGINT") if has_option else ()


class ForkedPython:
    """``python *arguments`` in a fork: a script, ``-m module`` or ``-c program``; with what the tests need of Popen.

    Args:
        arguments: What would follow ``python`` on the command line.
        environment: All of its environment variables.
        output: The file that gets all that it prints; default: the tests' own output.
        folder: Where it runs; default: where the tests do.
        python: What it takes for Python when it starts other programs; default: Python.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        environment: Mapping[str, str],
        output: Path | None = None,
        folder: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        self._output = output
        command = [*map(str, arguments)]
        args = (command, dict(environment), output, folder or Path.cwd(), python)
        self._process = _server.Process(target=_run, args=args)
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


@functools.cache
def stand_in_for_python() -> str:
    """A program that does what ``python script *arguments`` does, in a fork; for launchers that start programs.

    Also with ``-m module`` and ``-c program``. With other options than ``-u`` and ``-B``, it is Python itself.
    """
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    address, program = folder / "server", folder / "python"
    client = Path(__file__).with_name("client.py")
    fork = shlex.join([sys.executable, "-I", "-S", str(client), str(address)])
    options = f'case "$1" in -c | -m) ;; -*) exec {shlex.quote(sys.executable)} "$@" ;; esac'  # such as the hub
    program.write_text(
        f'#!/bin/sh\nwhile [ "$1" = -u ] || [ "$1" = -B ]; do shift; done\n{options}\nexec {fork} "$@"\n'
    )
    program.chmod(0o755)
    _server.Process(target=_serve, args=(str(address),), daemon=True).start()
    deadline = time.monotonic() + 60
    while not address.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return str(program)


def _serve(address: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for those that serve a client
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # its forks may have children
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        while True:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _fork_for(client)
            client.close()


def _fork_for(client: socket.socket) -> NoReturn:
    """Fork what a client asks for, and tell it how that ends; it does not outlive the client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, files, _, _ = socket.recv_fds(client, 2**20, 64)
    while not data.endswith(b"\n"):
        data += client.recv(2**20)
    request = json.loads(data)
    process = os.fork()
    if process == 0:
        client.close()
        _become(request, files)
    for number in files:
        os.close(number)
    client.sendall(f"{process}\n".encode())
    while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):
        if select.select([client], [], [], 0.02)[0]:  # it has closed
            os.kill(process, signal.SIGKILL)
    with contextlib.suppress(OSError):
        client.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())
    os._exit(0)


def _become(request: dict, files: Sequence[int]) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    aside = [fcntl.fcntl(number, fcntl.F_DUPFD, 500) for number in files]
    for own, number in zip(aside, request["files"], strict=True):
        os.dup2(own, number)
        os.close(own)
    code: object = 1
    try:
        _run(request["arguments"], request["environment"], None, request["folder"])
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        if "mpi4py.MPI" in sys.modules:
            sys.modules["mpi4py.MPI"].Finalize()  # as it does itself when Python ends
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: Path | None,
    folder: Path,
    python: str = sys.executable,
) -> None:
    os.setsid()
    assert "preloaded" in sys.modules, "the fork server could not import preloaded.py, and does not say so"
    sys.executable = python
    multiprocessing.set_start_method(None, force=True)  # not the fork server's: a program begins with Python's default
    if output is not None:
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", *sys.path)]
    os.chdir(folder)
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = [*arguments]
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
