"""Worlds of four ranks, one per backend, for the conformance suite. As a program, this file is one of the ranks."""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import ForkedPython, stand_in_for_python
from torch import Tensor
from torch.futures import Future

from lightning_hiercomm.comm.base import Communicator, Connect, Handle, completed_future
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.shared_memory import sharing_memory
from lightning_hiercomm.comm.staged import connect_gloo
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.comm.torch import connect_torch

SIZE = 4
EVERYONE = (tuple(range(SIZE)),)
SECONDS = 30.0

Work = Callable[..., Any]
Start = Callable[[Sequence[str], Mapping[str, str]], "subprocess.Popen[bytes] | ForkedPython"]


class Rank:
    """What a work function gets: its number, its meter, and communicators."""

    def __init__(self, rank: int, connect: Callable[[Meter], Connect], device: torch.device | None = None) -> None:
        self.rank = rank
        self.device = device
        self.size = SIZE
        self._made: dict[Any, Communicator | None] = {}
        self.start_over()
        self.connect = connect(self.meter)

    def start_over(self) -> None:
        self.meter = Meter()

    @staticmethod
    def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Small integers, so that every dtype sums them exactly: rank + 1, 1 more at every element, modulo 8."""
        return ((torch.arange(numel) + rank + 1) & 7).to(dtype)

    def group(
        self, groups: Sequence[Sequence[int]] = EVERYONE, level: str = "inter", duplicate: int = 0
    ) -> Communicator | None:
        """This rank's communicator in one of ``groups``; made once per world, because making them is slow."""
        key = (tuple(map(tuple, groups)), level, duplicate)
        if key not in self._made:
            self._made[key] = self.connect(groups, level)
        communicator = self._made[key]
        if communicator is not None:
            communicator.meter = self.meter
            if self.device is not None:
                return OnDevice(communicator, self.device)  # type: ignore[return-value]  # looks like one
        return communicator


class OnDevice:
    """A communicator whose tensors live on a device, for work that knows those of the CPU only.

    What is moved is a copy on the device, laid out in memory as the work's own is, and what has arrived is copied back
    at the wait.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator, self._device = communicator, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_communicator", "_device"):
            super().__setattr__(name, value)
        else:
            setattr(self._communicator, name, value)

    def all_reduce(self, tensor: Tensor, *arguments: Any, **named: Any) -> Handle:
        return self._move(lambda there: self._communicator.all_reduce(there(tensor), *arguments, **named), [tensor])

    def reduce_scatter(self, output: Tensor, tensor: Tensor, weight: float = 1.0) -> Handle:
        return self._move(
            lambda there: self._communicator.reduce_scatter(there(output), there(tensor), weight), [output]
        )

    def all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._move(lambda there: self._communicator.all_gather(there(output), there(tensor)), [output])

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        return self._move(lambda there: self._communicator.broadcast(there(tensor), source), [tensor])

    def exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        return self._move(
            lambda there: self._communicator.exchange(
                [(there(tensor), peer) for tensor, peer in send], [(there(buffer), peer) for buffer, peer in receive]
            ),
            [buffer for buffer, _ in receive],
        )

    def _move(self, launch: Callable[[Callable[[Tensor], Tensor]], Handle], arrive: Sequence[Tensor]) -> Handle:
        memory: dict[int, Tensor] = {}

        def there(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in memory:
                bytes_ = torch.empty(0, dtype=torch.uint8).set_(storage)
                memory[storage._cdata] = bytes_.to(self._device)
            whole = memory[storage._cdata].view(tensor.dtype)
            return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        handle = launch(there)
        return _FromDevice(handle, [(tensor, there(tensor)) for tensor in arrive])


class _FromDevice(Handle):
    def __init__(self, handle: Handle, arrive: list[tuple[Tensor, Tensor]]) -> None:
        self._handle, self._arrive = handle, arrive

    def wait(self) -> None:
        self._handle.wait()
        for tensor, there in self._arrive:
            tensor.copy_(there)
        self._arrive = []

    def is_done(self) -> bool:
        return self._handle.is_done()

    def future(self, value: Tensor) -> Future[Tensor]:
        there = next(there for tensor, there in self._arrive if tensor is value)
        arrived = self._handle.future(there).wait()
        assert arrived.data_ptr() == there.data_ptr()
        return completed_future(value.copy_(arrived))


class World(ABC):
    """Four ranks that run work functions, ``work(rank, *arguments)``, of a test module."""

    @abstractmethod
    def run(self, work: Work, *arguments: Any) -> list[Any]:
        """What ``work`` returned on each rank; raises if it raised on any."""

    def close(self) -> None: ...


class Threads(World):
    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    def run(self, work: Work, *arguments: Any) -> list[Any]:
        def on_rank(rank: int, world: ThreadWorld) -> Any:
            return work(Rank(rank, lambda meter: world.connect(rank, meter), self._device), *arguments)

        return ThreadWorld(SIZE).run(on_rank)


class Processes(World):
    """Starts the ranks at the first run, and again after a failure.

    Args:
        starts: Start one or all of them, given the arguments of Python and the environment variables to add.
    """

    def __init__(self, starts: Sequence[Start]) -> None:
        self._starts = starts
        self._processes: list[subprocess.Popen[bytes] | ForkedPython] = []
        self._ranks: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, work: Work, *arguments: Any) -> list[Any]:
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.send_bytes(pickle.dumps((work.__code__.co_filename, work.__qualname__, arguments)))
        results: dict[int, Any] = {}
        errors: list[str] = []
        deadline = time.monotonic() + SECONDS
        while len(results) < SIZE and not errors:
            waiting = [rank for i, rank in enumerate(self._ranks) if i not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                errors = [f"rank {i} did not end within {SECONDS} s" for i in range(SIZE) if i not in results]
            for rank in ready:
                assert isinstance(rank, Connection)
                number = self._ranks.index(rank)
                try:
                    error, results[number] = pickle.loads(rank.recv_bytes())
                except (EOFError, ConnectionResetError):
                    error = "the process died; its output says why"
                if error:
                    errors.append(f"rank {number}: {error}")
        if errors:
            self.close()
            pytest.fail("\n".join(errors))
        return [results[number] for number in range(SIZE)]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        for end in (lambda process: None, methodcaller("terminate"), _kill_group):  # idle ranks end by themselves
            for process in self._processes:
                end(process)
            with suppress(subprocess.TimeoutExpired):
                for process in self._processes:
                    process.wait(timeout=3)
        if self._folder is not None:
            self._folder.cleanup()
        self._ranks, self._processes, self._folder = [], [], None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address, key = f"{self._folder.name}/ranks", secrets.token_hex(16)
        with Listener(address, "AF_UNIX", backlog=SIZE, authkey=key.encode()) as listener:
            for start in self._starts:
                self._processes.append(start([__file__, address], {"RANK_KEY": key}))
            listener._listener._socket.settimeout(SECONDS)  # type: ignore[attr-defined]  # accept() knows none
            joined = {connection.recv(): connection for connection in (listener.accept() for _ in range(SIZE))}
        self._ranks = [joined[number] for number in range(SIZE)]


def _fork(rank: int, **variables: str) -> Start:
    def start(arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedPython:
        return ForkedPython(
            arguments, {**os.environ, **environment, "OMP_NUM_THREADS": "1", "RANK": str(rank), **variables}
        )

    return start


# of the package a rank imports comm, which needs no Lightning: with __init__.py it would start two seconds later
_ONLY_COMM = """
import importlib.util, runpy, sys
del sys.path[0], sys.argv[0]
sys.modules["lightning_hiercomm"] = importlib.util.module_from_spec(importlib.util.find_spec("lightning_hiercomm"))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_PYTHON = (sys.executable, "-c", _ONLY_COMM)


def _execute(command: Sequence[str], environment: Mapping[str, str]) -> Start:
    def start(arguments: Sequence[str], own: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, *arguments], env={**environment, **own}, start_new_session=True)

    return start


def _kill_group(process: subprocess.Popen[bytes] | ForkedPython) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


FORKED: dict[str, dict[str, str]] = {
    "gloo": {},
    "gloo-lazy": {"TORCH_GLOO_LAZY_INIT": "1"},  # as in groups between more nodes
    "shared-memory": {"SHARE_MEMORY": "1"},
}
BACKENDS = ["threads", *FORKED, "openmpi", "mpich"]
ON_A_GPU = [pytest.param(f"{name}, gpu", marks=pytest.mark.gpu) for name in ("threads", "gloo", "staged", "openmpi")]


@pytest.fixture(scope="session", params=[*BACKENDS, *ON_A_GPU * torch.cuda.is_available()])
def world(request: pytest.FixtureRequest, mpiexec: Any) -> Iterator[World]:
    """Four ranks, over each backend; with tensors of a GPU where there is one."""
    world: World
    if request.param.endswith("gpu"):
        if request.param == "threads, gpu":
            world = Threads(torch.device("cuda", torch.cuda.current_device()))
        elif request.param == "openmpi, gpu":
            command, environment = mpiexec("openmpi", SIZE)
            world = Processes([_execute([*command, *_PYTHON], {**environment, "DEVICE": "cuda"})])
        else:  # not forked: CUDA cannot be used in a fork of a process that has used it
            backend = {"DEVICE": "cuda", "STAGED": str(int(request.param == "staged, gpu"))}
            ranks = [{**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), **backend} for rank in range(SIZE)]
            world = Processes([_execute(_PYTHON, environment) for environment in ranks])
    elif request.param == "threads":
        world = Threads()
    elif request.param in FORKED:
        world = Processes([_fork(rank, **FORKED[request.param]) for rank in range(SIZE)])
    else:
        command, environment = mpiexec(request.param, SIZE)
        world = Processes([_execute([*command, stand_in_for_python()], environment)])
    yield world
    world.close()


@pytest.fixture
def rank(world: World) -> World:
    """In a test: this rank, as the test runs on each of the four ranks of a world, over each backend."""
    return world


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that takes a ``rank`` on each rank of its world, with its other arguments."""
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    world = arguments.pop("rank", None)
    if not isinstance(world, World):
        return None
    world.run(pyfuncitem.obj, *arguments.values())
    return True


def _serve(address: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if "DEVICE" in os.environ else None
    if "RANK" in os.environ:
        number = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=f"file://{address}.store", rank=number, world_size=SIZE)
        connect: Callable[[Meter], Connect] = connect_torch
        if "SHARE_MEMORY" in os.environ:
            connect = _connect_sharing
        elif os.environ.get("STAGED") == "1":
            connect = connect_gloo
        rank = Rank(number, connect, device)
    else:
        from lightning_hiercomm.comm.mpi import connect_mpi, load_mpi

        number = load_mpi().COMM_WORLD.Get_rank()
        rank = Rank(number, lambda meter: connect_mpi(meter, number, SIZE), device)
    with Client(address, "AF_UNIX", authkey=os.environ["RANK_KEY"].encode()) as test:
        test.send(number)
        modules: dict[str, Any] = {}
        with suppress(EOFError):  # the test process is done
            while True:
                path, name, arguments = pickle.loads(test.recv_bytes())
                error, result = "", None
                faulthandler.dump_traceback_later(SECONDS - 5, exit=True)
                try:
                    if path not in modules:
                        modules[path] = _load(path)
                    rank.start_over()
                    result = getattr(modules[path], name)(rank, *arguments)
                except BaseException:
                    error = traceback.format_exc()
                faulthandler.cancel_dump_traceback_later()
                test.send_bytes(pickle.dumps((error, result)))  # send() would share memory


def _connect_sharing(meter: Meter) -> Connect:
    return sharing_memory(connect_torch(meter), timedelta(seconds=20), levels=("intra", "inter"))


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _serve(*sys.argv[1:])
