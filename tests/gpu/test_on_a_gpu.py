"""What only a GPU shows. Two ranks are threads that share it, each on a stream of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import on_ranks
from torch import nn

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.staged import StagedCommunicator
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes import DASO, AllReduce, Context, DiLoCo, Gossip, PeriodicAveraging, Scheme, StepsDelay
from lightning_hiercomm.schemes.gradient_path import gradient_path

pytestmark = pytest.mark.gpu


ROOT = Path(__file__).parents[2]
NODES = ((0,), (1,))
_ONE_SEED = threading.Lock()
PERIOD = 8
CYCLING = {"warmup": 0, "cooldown": 0, "plateau": None}
QUIET: dict[str, Callable[[], Scheme]] = {
    # of each eight steps, those but the first two and the last two have neither an exchange nor a merge
    "periodic": lambda: PeriodicAveraging(PERIOD),
    "daso": lambda: DASO(PERIOD, 1, **CYCLING),
    "diloco": lambda: DiLoCo(PERIOD),
    "streaming": lambda: DiLoCo(PERIOD, staleness=1),
    "all_reduce": AllReduce,
}
ALL: dict[str, Callable[[], Scheme]] = {
    **QUIET,
    "gossip": lambda: Gossip(overlap=True),
    "steps_delay": lambda: StepsDelay(2, warmup_steps=2),
}
COPIES = {  # of the model, on one rank, beyond parameters, gradients and momentum; one more for what is on its way
    "periodic": 3.0,  # what leaves; and threads have no wire: a copy of it, and the sum, before it is written back
    "daso": 3.0,
    "diloco": 5.0,  # outer parameters, their momentum, and the way
    "streaming": 6.0,
    "all_reduce": 2.0,
    "gossip": 4.0,
    "steps_delay": 7.0,  # weights, momentum and gradients of the shard, what travels, GLU's
}


@contextmanager
def training(topology: Topology, scheme: Scheme, model: nn.Module, samples: int = 64):
    """A function that takes one step with the model's own loss on a fixed batch; it never looks at a value."""
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    gradients = gradient_path(scheme.gradients, topology, device, Wire(), chunk_bytes=2**22)
    replica = Replica(model.parameters(), named=model.named_parameters())
    running = scheme.build(Context(replica, topology, optimizer, Wire()))
    running.begin_run(1, None)
    running.begin_epoch(0)
    width = next(model.parameters()).shape[-1]
    batch = torch.randn(samples, width, generator=torch.Generator().manual_seed(topology.rank)).to(device)

    def step() -> None:
        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(batch).square().mean().backward()
            for index, parameter in enumerate(model.parameters()):
                gradients.reduce(parameter.grad.view(-1), index).wait()
            optimizer.step()

        running.step(run)

    try:
        yield step
        running.finish()
    finally:
        running.close(1.0)
        gradients.close(1.0)


def layers(device: torch.device, width: int = 256, depth: int = 4) -> nn.Module:
    with _ONE_SEED:  # threads share the generator
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))).to(device)


def values(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("name", QUIET)
def test_no_step_between_syncs_waits_for_the_device(name, gpu):
    together = threading.Barrier(2)

    def work(topology: Topology) -> None:
        with training(topology, QUIET[name](), layers(gpu)) as step:
            for number in range(1, 3 * PERIOD + 1):
                is_quiet = number > PERIOD and 2 < (number - 1) % PERIOD + 1 < PERIOD - 1
                is_quiet &= name != "all_reduce" or number % 10 != 0  # it looks at its parameters then, as it says
                together.wait()
                if topology.rank == 0:  # the mode is the process's
                    torch.cuda.set_sync_debug_mode("error" if is_quiet else "default")
                together.wait()
                step()
            together.wait()
            torch.cuda.set_sync_debug_mode("default")

    try:
        on_ranks(work, NODES)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_staging_copies_overlap_with_computation(gpu):
    def staging(connect):
        def connect_staged(groups, level):
            communicator = connect(groups, level)
            return (
                StagedCommunicator(communicator, Meter())
                if communicator is not None and level == "inter"
                else communicator
            )

        return connect_staged

    def work(topology: Topology) -> None:
        # the host is far ahead of the device, so that what computes is there when something is to be copied
        with training(topology, DASO(4, 2, **CYCLING), layers(gpu, width=1024, depth=16), samples=8192) as step:
            for _ in range(12):
                step()

    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        on_ranks(work, NODES, connect=staging, waits_on_host=True)
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [event.time_range for event in on_device if "DtoH" in event.name]
    kernels = [event.time_range for event in on_device if "Mem" not in event.name]
    assert copies
    assert any(copy.start < kernel.end and kernel.start < copy.end for copy in copies for kernel in kernels)


@pytest.mark.parametrize("name", ALL)
def test_a_scheme_needs_no_more_memory_than_its_copies_of_the_model(name, gpu):
    def work(topology: Topology, synchronizes: bool = True) -> None:
        scheme = ALL[name]() if synchronizes else PeriodicAveraging(10 * PERIOD)
        with training(topology, scheme, layers(gpu, 512, 8)) as step:
            for _ in range(2 * PERIOD):
                step()
            peaks.append(torch.cuda.max_memory_allocated())  # before the run's end, at which nodes synchronize

    def peak(synchronizes: bool) -> int:
        """The most bytes that two ranks have held; half of it is cuBLAS's, whose workspaces each stream gets."""
        peaks.clear()
        torch._C._cuda_clearCublasWorkspaces()  # those of streams that tests before had, and may get again
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        on_ranks(partial(work, synchronizes=synchronizes), NODES)
        return max(peaks) - before

    peaks: list[int] = []
    model = 4 * 8 * (512 * 512 + 512)
    alone = peak(synchronizes=False)
    beyond = (peak(synchronizes=True) - alone) / model / 2
    assert beyond <= COPIES[name] + 0.5, beyond


@pytest.mark.parametrize("how", ["compiled", "in CUDA graphs"])
@pytest.mark.parametrize("name", ALL)
def test_a_compiled_or_captured_model_trains_as_it_is(name, how, gpu):
    one_after_another, together = threading.Lock(), threading.Barrier(2)

    def work(topology: Topology, is_changed: bool) -> torch.Tensor:
        model = layers(gpu)
        together.wait()
        if is_changed and how == "compiled":
            model.compile()
        elif is_changed:  # no other thread may use the device while a graph is captured
            with one_after_another:
                model = torch.cuda.make_graphed_callables(model, (torch.randn(64, 256, device=gpu),))
        together.wait()
        with training(topology, ALL[name](), model) as step:
            for _ in range(PERIOD + 2):
                step()
        return values(model)

    plain, changed = (on_ranks(partial(work, is_changed=each), NODES, timeout=120.0) for each in (False, True))
    torch.testing.assert_close(changed[0], plain[0], rtol=1e-4, atol=1e-5)  # other kernels round otherwise


UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
MEMCHECK = ["compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "7"]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("environment", "tool"),
    [
        # a tensor that goes is freed, and what still uses it fails or reads anything
        pytest.param(UNCACHED, [], id="memory that another stream uses is not freed early"),
        # torch.cuda._sanitizer watches which stream uses which tensor
        pytest.param({"TORCH_CUDA_SANITIZER": "1"}, [], id="no use is out of order"),
        # every tensor is in memory of its own, so that the tool sees its bounds
        pytest.param(UNCACHED, MEMCHECK, id="no kernel uses freed memory"),
    ],
)
def test_oracle_traces_pass_checks_of_memory_and_order(environment, tool):
    """They run in a process of their own."""
    if tool and shutil.which(tool[0]) is None:
        pytest.skip("compute-sanitizer, of the CUDA toolkit, is not installed")
    paths = ["tests/schemes/test_periodic.py", "tests/schemes/reducers/test_sharded.py"]
    command = [*tool, sys.executable, "-m", "pytest", "-x", "-q", "-m", "gpu", *paths]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:]


def test_one_rank_trains_over_nccl(gpu, tmp_path):
    """nccl refuses two ranks on one GPU; with more GPUs, each rank has its own, and every rank is a node."""
    ranks = torch.cuda.device_count()
    program = ROOT / "tests" / "jobs" / "over_nccl.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    ended = subprocess.run([*command, str(program), str(tmp_path)], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for name, values in found[0].items():
        for other in found:
            assert torch.equal(other[name], values), name
