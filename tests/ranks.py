"""Processes that play ranks, for one program after another: to start them costs more than a fit."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from lightning.fabric.plugins.environments.lightning import find_free_network_port

T = TypeVar("T")


class RankError(Exception):
    """What went wrong on ranks, by rank."""


class Ranks:
    """Forked processes, as many as a program asks for, that stay for the next one unless one of them fails.

    Args:
        seconds: After so long a program counts as hanging.
    """

    def __init__(self, seconds: float = 240.0) -> None:
        self._seconds = seconds
        self._worlds: dict[int, list[tuple[Any, Any]]] = {}

    def run(self, ranks: int, program: Callable[..., T], *arguments: Any) -> list[T]:
        """What ``program(*arguments)``, a function of a module, returns on every rank.

        Raises:
            RankError: If it fails on any, with what all of them say.
        """
        world = self._worlds.get(ranks) or self._start(ranks)
        for _, connection in world:
            connection.send_bytes(pickle.dumps((program, arguments)))
        returned: dict[int, Any] = {}
        failed: dict[int, str] = {}
        deadline = time.monotonic() + self._seconds
        waiting = {connection: rank for rank, (_, connection) in enumerate(world)}
        while waiting and time.monotonic() < deadline:
            for ready in multiprocessing.connection.wait(list(waiting), timeout=1.0):
                rank = waiting.pop(ready)  # type: ignore[call-overload]
                try:
                    is_well, value = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    is_well, value = False, "ended without a word"
                (returned if is_well else failed)[rank] = value
                if not is_well:  # the others have a while to find out
                    deadline = min(deadline, time.monotonic() + 20.0)
        failed.update(dict.fromkeys(waiting.values(), "hangs" if not failed else "had not found out after 20 s"))
        if failed:
            self._stop(ranks)
            raise RankError("\n".join(f"rank {rank}: {failed[rank]}" for rank in sorted(failed)))
        return [returned[rank] for rank in range(ranks)]

    def close(self) -> None:
        """End all of them."""
        for ranks in list(self._worlds):
            self._stop(ranks)

    def _start(self, ranks: int) -> list[tuple[Any, Any]]:
        context = multiprocessing.get_context("fork")
        port = find_free_network_port()
        world = []
        for rank in range(ranks):
            own, other = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, other), daemon=True)
            process.start()
            other.close()
            world.append((process, own))
        self._worlds[ranks] = world
        return world

    def _stop(self, ranks: int) -> None:
        for process, connection in self._worlds.pop(ranks):
            connection.close()
            process.kill()
            process.join()


def _serve(rank: int, port: int, connection: Any) -> None:
    gc.freeze()  # in a forked rank the collector's every look at what was there before is a copy
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    warnings.filterwarnings("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    while True:
        try:
            program, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            said = True, program(*arguments)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = False, f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"  # type: ignore[assignment]
        connection.send_bytes(pickle.dumps(said))
