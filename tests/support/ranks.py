"""Processes that play ranks, for one program after another: to start them costs more than a fit."""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import cloudpickle
import numpy
import torch
import torch.distributed as dist
from ports import free_port
from torch.distributed import distributed_c10d

from lightning_hiercomm._lightning.launcher import settle_as_fork

T = TypeVar("T")
_PARENT_DEATH_SIGNAL = 1  # of prctl


class RankError(Exception):
    """What went wrong on ranks, by rank."""


class Ranks:
    """Forked processes, as many as a program asks for, that stay for the next one.

    Others take their place where one has failed, or does not look afterwards as it did before (``_looks``).

    Args:
        seconds: After so long a program counts as hanging.
        of: What they are forks of: ``"fork"``, this process, or ``"forkserver"``, one that has not touched a GPU
            whatever this one does, for then a fork could not.
    """

    def __init__(self, seconds: float = 240.0, of: Literal["fork", "forkserver"] = "fork") -> None:
        self._seconds = seconds
        self._context = multiprocessing.get_context(of)
        self._worlds: dict[int, list[tuple[Any, Any]]] = {}
        atexit.register(self.close)  # Python waits for those that are stopped, and for ever

    def run(self, ranks: int, program: Callable[..., T], *arguments: Any) -> list[T]:
        """What ``program(*arguments)`` returns on every rank; functions within functions can be programs, too.

        Raises:
            RankError: If it fails on any, with what all of them say.
        """
        world = self._worlds.get(ranks) or self._start(ranks)
        message = cloudpickle.dumps((program, arguments))
        try:
            for process, connection in world:
                os.kill(process.pid, signal.SIGCONT)
                connection.send_bytes(message)
            return self._returned(ranks, world)
        except BaseException:  # of pytest's, too, for which a test takes too long
            self._stop(ranks)
            raise
        finally:
            for process, _ in self._worlds.get(ranks, []):  # which have threads of gloo's that keep waking
                os.kill(process.pid, signal.SIGSTOP)

    def _returned(self, ranks: int, world: list[tuple[Any, Any]]) -> list[Any]:
        are_as_before = True
        returned: dict[int, Any] = {}
        failed: dict[int, str] = {}
        deadline = time.monotonic() + self._seconds
        waiting = {connection: rank for rank, (_, connection) in enumerate(world)}
        while waiting and time.monotonic() < deadline:
            for ready in multiprocessing.connection.wait(list(waiting), timeout=1.0):
                rank = waiting.pop(ready)  # type: ignore[call-overload]
                try:
                    is_well, said, is_as_before = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
                    value = pickle.loads(said)
                    are_as_before &= is_as_before
                except EOFError:
                    is_well, value = False, "ended without a word"
                (returned if is_well else failed)[rank] = value
                if not is_well:  # the others have a while to find out
                    deadline = min(deadline, time.monotonic() + 20.0)
        failed.update(dict.fromkeys(waiting.values(), "hangs" if not failed else "had not found out after 20 s"))
        if failed:
            raise RankError("\n".join(f"rank {rank}: {failed[rank]}" for rank in sorted(failed)))
        if not are_as_before:
            self._stop(ranks)
        return [returned[rank] for rank in range(ranks)]

    def close(self) -> None:
        for ranks in list(self._worlds):
            self._stop(ranks)

    def _start(self, ranks: int) -> list[tuple[Any, Any]]:
        context = self._context
        port = free_port()
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
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)  # otherwise a stopped rank would stay
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have workers
    settle_as_fork("fork")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    warnings.filterwarnings("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    environment = dict(os.environ)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        before = _process_state()
        try:
            program, arguments = pickle.loads(message)
            is_well, said = True, cloudpickle.dumps(program(*arguments))
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            is_well, said = False, pickle.dumps(f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")
        program = arguments = None
        _close_groups()
        os.environ.clear()
        os.environ.update(environment)
        until = time.monotonic() + 2
        while (
            (is_as_before := _process_state() == before) is False
            and time.monotonic() < until
            and _threads() - before[0]
        ):
            time.sleep(0.01)
        connection.send_bytes(pickle.dumps((is_well, said, is_as_before)))


def _close_groups() -> None:
    """Destroy all process groups, also those that failed fits left registered."""
    if dist.is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    collect_trainers()


def collect_trainers() -> None:
    """Collect old trainers, whose reference cycles hold process groups with threads of gloo."""
    for _ in range(2):  # what finalizers of the first let go is found by the second
        gc.collect()


def _process_state() -> tuple[Any, ...]:
    """Return state of this process that the next program could notice."""
    return (
        _threads(),
        os.getcwd(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)],
        multiprocessing.active_children(),
    )


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("hiercomm")}
