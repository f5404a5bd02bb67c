"""Every private or fragile touch of Lightning and torch: one function each, each with its reason and its test."""

from __future__ import annotations

import difflib
import gc
import inspect
import multiprocessing
import multiprocessing.context
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities import imports
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.load import _METADATA_FILENAME as METADATA_FILENAME
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import RunningStage, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import _rendezvous_handlers
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_unflatten

from lightning_hiercomm.comm.mpi import load_mpi

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
except ImportError:  # not public before torch 2.6 and 2.5
    from torch.distributed._composable.fsdp import FSDPModule  # type: ignore[attr-defined,no-redef,unused-ignore]
    from torch.distributed._tensor import (  # type: ignore[attr-defined,no-redef,unused-ignore]
        DTensor,
        Shard,
        distribute_tensor,
    )

__all__ = ["METADATA_FILENAME", "DTensor", "Shard", "distribute_tensor"]


def name_tree(name: str) -> str:
    """To whom this module's classes belong, and where their twins are, for people who mix Lightning's two packages.

    ``lightning.pytorch`` and ``pytorch_lightning`` are one code base, but two trees of classes; the Trainer of one
    refuses objects of the other.
    """
    ours = {"lightning.pytorch": "lightning_hiercomm", "pytorch_lightning": "lightning_hiercomm.pytorch_lightning"}
    (other,) = ours.keys() - {pl.__name__}
    return f"`{pl.__name__}`; with `{other}`, use `{ours[other]}.{name}`"


def check_ddp_arguments(arguments: Iterable[str], strategy: type) -> None:
    """Refuse keywords that ``DDPStrategy`` would take, and ``DistributedDataParallel`` refuse only inside ``fit``.

    Args:
        arguments: Names of the keywords that are not the strategy's own.
        strategy: Whose process group and communication hook DDP gets.

    Raises:
        ValueError: For those that the strategy itself sets.
        TypeError: For those that nobody knows.
    """
    owned = {"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "process_group"}
    owned |= {"module", "device_ids", "device_mesh", "output_device", "dim"}
    known = inspect.signature(DistributedDataParallel).parameters.keys() - owned
    own = inspect.signature(strategy).parameters.keys() - {"ddp_kwargs"}
    for name in arguments:
        if name in owned:
            raise ValueError(
                f"{name} cannot be set: {strategy.__name__} owns DDP's process group, devices and communication hook."
                " Choose what nodes exchange with `scheme` and `wire_dtype`."
            )
        if name not in known:
            near = difflib.get_close_matches(name, [*own, *known], n=1)
            hint = (
                f"Did you mean {near[0]!r}?" if near else f"DistributedDataParallel takes {', '.join(sorted(known))}."
            )
            raise TypeError(f"{strategy.__name__} has no argument {name!r}. {hint}")


def replace_sigterm_broadcast(
    trainer: pl.Trainer, should_stop: Callable[[], bool], on_sigterm: Callable[[], None]
) -> None:
    """Take Lightning's SIGTERM handling over.

    ``_TrainingEpochLoop`` broadcasts a flag over the world before every batch, so the nodes wait for each other
    at every step. And its signal handler starts a broadcast of its own, which only matches the first if rank 0 was hit.

    Args:
        trainer: Of the run that is being set up; its handlers are registered after that.
        should_stop: Called before every batch, on every rank; True stops the run there with a ``SIGTERMException``.
        on_sigterm: Called when this process receives a SIGTERM.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    _require_attribute(loop, "_broadcast_sigterm_tensor")
    _require_attribute(connector, "_sigterm_notifier_fn")

    def before_batch() -> None:
        if should_stop():
            connector.received_sigterm = True
            raise SIGTERMException

    def notify(signum: Any, _: Any) -> None:
        if trainer.strategy.launcher is not None and not connector.received_sigterm:
            trainer.strategy.launcher.kill(signum)  # pass it on to the processes that we launched
        on_sigterm()

    loop._broadcast_sigterm_tensor = before_batch  # type: ignore[method-assign]
    connector._sigterm_notifier_fn = notify  # type: ignore[method-assign]


def restore_sigterm_broadcast(trainer: pl.Trainer) -> None:
    """Undo :func:`replace_sigterm_broadcast`, so that the trainer can be pickled and used with another strategy."""
    trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
    trainer._signal_connector.__dict__.pop("_sigterm_notifier_fn", None)


def mark_sigterm_received(trainer: pl.Trainer) -> None:
    """Let Lightning's own checks see a SIGTERM; ``Trainer.received_sigterm`` has no setter."""
    trainer._signal_connector.received_sigterm = True


class WatchfulLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of forked and spawned ranks, with three gaps closed.

    There ``Strategy.on_exception`` and ``teardown`` run in the process that launched only, where nothing is known of
    the rank that raised. And after ``sys.exit()`` or ``os._exit(0)`` on one rank the launcher waits for the others, and
    they for that one. And a forked rank may hang when it collects what its parent left behind.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        assert isinstance(self._strategy, DDPStrategy)
        # shared with the ranks, also when they are spawned
        self._has_finished = multiprocessing.get_context(self._start_method).RawArray("b", self._strategy.num_processes)
        self._watcher: tuple[threading.Thread, threading.Event] | None = None
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            if self._watcher is not None:  # a thread that ends while the next launch forks may leave a lock behind
                thread, is_over = self._watcher
                is_over.set()
                thread.join()
                self._watcher = None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if multiprocessing.context.get_spawning_popen() is None:  # else a rank that starts inherits what it shares
            state["_has_finished"] = None
        return {**state, "_watcher": None}

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        leave_garbage_of_parent(self._start_method)
        try:
            super()._wrapping_function(process_idx, *args, **kwargs)
            self._has_finished[process_idx] = 1
        except BaseException as error:
            self._strategy.on_exception(error)
            self._strategy.teardown()
            if isinstance(error, SystemExit) and not error.code:
                raise SystemExit(1) from error
            raise

    @property
    def procs(self) -> list[Any]:
        """The ranks' processes; set when they have been started."""
        processes: list[Any] = self.__dict__.get("procs", [])
        return processes

    @procs.setter
    def procs(self, processes: list[Any]) -> None:
        self.__dict__["procs"] = processes
        if processes and self._start_method in ("fork", "spawn"):  # of the fork server's only one may ask how they end
            is_over = threading.Event()
            watched = (processes, self._has_finished, is_over)
            thread = threading.Thread(target=self._watch, args=watched, name="hiercomm-launcher", daemon=True)
            self._watcher = thread, is_over
            thread.start()

    @staticmethod
    def _watch(processes: list[Any], has_finished: Any, is_over: threading.Event) -> None:
        running = dict(enumerate(processes))
        while running and not is_over.wait(0.2):
            for index, process in [*running.items()]:
                exit_code = _exit_code(process)
                if exit_code is None:
                    continue
                del running[index]
                if exit_code == 0 and not has_finished[index]:
                    message = f"local rank {index} ended, with exit code 0, before its work was done"
                    print(f"lightning_hiercomm: {message}", file=sys.stderr, flush=True)
                    _end_soon([*running.values()])
                    return


def leave_garbage_of_parent(start_method: str) -> None:
    """Keep a forked rank from collecting what its parent left behind.

    If that owns threads, as a process group does, its end would wait for ever: they are in the parent only.
    """
    if start_method == "fork":
        gc.freeze()


def _end_soon(processes: list[Any], patience: float = 3.0) -> None:
    """Kill what has not ended after some seconds: a rank that is just telling why it ends must not be broken off."""
    deadline = time.monotonic() + patience
    while processes and time.monotonic() < deadline:
        time.sleep(0.1)
        processes = [process for process in processes if _exit_code(process) is None]
    for process in processes:
        process.kill()


def _exit_code(process: Any) -> int | None:
    """How a child process has ended, if it has; left for the launcher to find out, who would else get nothing."""
    try:
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the launcher has found out
        code: int | None = process._popen.returncode
        return code
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def check_ranks_of_node(environment: ClusterEnvironment) -> None:
    """Compare ``Trainer(devices=...)`` with the ranks that torchrun or mpiexec started on this node.

    ``TorchElasticEnvironment`` insists on ``devices * num_nodes`` ranks, but nodes may be unequal; ``MPIEnvironment``
    checks nothing, and ranks without a device fail one by one.
    """
    if isinstance(environment, TorchElasticEnvironment):
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    elif isinstance(environment, MPIEnvironment):
        node = environment.node_rank()
        ranks = load_mpi().COMM_WORLD.allgather(node).count(node)
    else:
        return

    environment.validate_settings = partial(_check_devices, ranks)  # type: ignore[method-assign]


def _check_devices(ranks: int, num_devices: int, num_nodes: int) -> None:
    if num_devices != ranks:
        raise ValueError(
            f"Trainer(devices={num_devices}), but {ranks} ranks were started on this node: give devices={ranks}"
            " here. Nodes may have unequal numbers of ranks."
        )


def check_program_can_run_again() -> None:
    """Refuse to start ranks by running the program again where there is none: in a notebook, or at a Python prompt.

    Lightning refuses it, too, but the remedy it names is its own ``ddp_notebook``.
    """
    if imports._IS_INTERACTIVE:
        raise MisconfigurationException(
            "start_method='popen' starts ranks by running the script again, but an interactive session has none. Use"
            " HierarchicalStrategy(..., start_method='fork'), or a name that ends in _notebook, such as"
            " Trainer(strategy='hierarchical_periodic_notebook')."
        )


@contextmanager
def process_group_meets_at(store: Store | None, rank: int, size: int) -> Iterator[None]:
    """Let ``init_process_group`` meet at a store, in place of the one that ``env://`` stands for.

    That of torchrun's agent still holds the addresses of ranks that died: ranks that are started again call those, and
    give up (pytorch/pytorch#135712, #167288). Lightning passes no store on.

    Args:
        store: The same on every rank, with no process group's words in it; None for what ``env://`` stands for.
        rank: This rank.
        size: Number of ranks.
    """
    if store is None:
        yield
        return
    original = _rendezvous_handlers["env"]
    _rendezvous_handlers["env"] = lambda *_, **__: iter([(store, rank, size)])
    try:
        yield
    finally:
        _rendezvous_handlers["env"] = original


def explain_unused_parameters(exception: BaseException) -> None:
    """Say of DDP's error about parameters without gradient, by its text, how ours is told to expect them.

    What Lightning would make of it names its own ``DDPStrategy``.
    """
    if any("Expected to have finished reduction in the prior iteration" in str(arg) for arg in exception.args):
        exception.args = (
            "It looks like your LightningModule has parameters that were not used in producing the loss returned by"
            " training_step. If this is intentional, you must enable the detection of unused parameters in DDP, by"
            " setting the flag in the strategy with `strategy=HierarchicalStrategy(find_unused_parameters=True)`.",
        )


def raw_optimizer(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """The user's own optimizer inside Lightning's wrapper (``LightningOptimizer.optimizer`` is a property)."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def is_interrupted(trainer: pl.Trainer | None) -> bool:
    """Whether an exception is being handled: then other ranks may not be there for a collective."""
    return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED


def put_callback_first(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Add a callback before the user's: strategies have no epoch hooks, and checkpoints are written by callbacks."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [callback, *(other for other in callbacks if type(other) is not type(callback))]


def remove_callback(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Undo :func:`put_callback_first`."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [other for other in callbacks if other is not callback]


def keep_sync_batchnorm_in_group(module: nn.Module, group: Any) -> None:
    """Point SyncBatchNorm layers at a process group; Lightning converts them over the world."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            layer.process_group = group


def holds_averaged_weights(checkpoint: Mapping[str, Any]) -> bool:
    """Whether the ``WeightAveraging`` callback put its average, made of one node's weights, into the ``state_dict``."""
    return "current_model_state" in checkpoint


def skips_backward(trainer: pl.Trainer) -> bool:
    """Whether this epoch only collects BatchNorm statistics for the weights of ``StochasticWeightAveraging``."""
    return trainer.fit_loop._skip_backward


def batches_that_stepped(trainer: pl.Trainer) -> int:
    """The step that Lightning's loggers use: batches that stepped, however many optimizers did."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def leave_train_dataloaders_alone(trainer: pl.Trainer) -> None:
    """Keep Lightning from putting a DistributedSampler into train dataloaders; into those of evaluation it still does.

    ``Trainer(use_distributed_sampler=False)`` would switch it off for all, and afterwards nobody knows what was there.
    """
    connector = trainer._data_connector
    _require_attribute(connector, "_prepare_dataloader")
    original = type(connector)._prepare_dataloader

    def prepare(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        return dataloader if mode == RunningStage.TRAINING else original(connector, dataloader, shuffle, mode)

    connector._prepare_dataloader = prepare  # type: ignore[method-assign]


def prepare_train_dataloaders_again(trainer: pl.Trainer) -> None:
    """Undo :func:`leave_train_dataloaders_alone`."""
    trainer._data_connector.__dict__.pop("_prepare_dataloader", None)


def mark_means_of_a_step(trainer: pl.Trainer, mark: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter ``mark()`` while ``self.log`` of a training hook reduces a value over the ranks.

    ``Strategy.reduce`` gets both the values of ``on_step=True``, which are means over a rank's batch, and the sums that
    ``on_epoch=True`` makes of them and of the batch sizes. Only the former need weights.
    """
    results = trainer.fit_loop.epoch_loop._results
    _require_attribute(results, "update_metrics")
    original = type(results).update_metrics

    def update_metrics(key: str, value: Any, batch_size: int) -> None:
        with mark():
            original(results, key, value, batch_size)

    results.update_metrics = update_metrics


def unmark_means_of_a_step(trainer: pl.Trainer) -> None:
    """Undo :func:`mark_means_of_a_step`."""
    trainer.fit_loop.epoch_loop._results.__dict__.pop("update_metrics", None)


def takes_dataloader_iter(module: pl.LightningModule) -> bool:
    """Whether the training step fetches its batches itself."""
    return is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)


def training_step_inputs(trainer: pl.Trainer, batch: Any) -> list[Any]:
    """What the training step is called with: the batch and, if it takes one, an index."""
    return list(trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0).values())


def train_dataloaders(trainer: pl.Trainer) -> list[Any]:
    """The train dataloaders, processed; usually one. ``Trainer.train_dataloader`` keeps the user's own nesting."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    return list(combined.flattened)


def join_train_batches(trainer: pl.Trainer, batches: list[Any]) -> Any:
    """One batch of each train dataloader, in the user's own nesting."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    return tree_unflatten(batches, combined._spec)


def restart_train_dataloaders(trainer: pl.Trainer) -> None:
    """Begin the train dataloaders' iteration again: Lightning begins the first one when it makes the loaders."""
    assert trainer.fit_loop._data_fetcher is not None
    iter(trainer.fit_loop._data_fetcher)


def with_base_io(io: CheckpointIO | None, base: CheckpointIO) -> CheckpointIO:
    """The user's plugin, or ``base``, which is also what a plugin wraps that was given nothing else to wrap."""
    if io is None:
        return base
    if isinstance(io, _WrappingCheckpointIO):
        io.checkpoint_io = base  # which has no effect if there is one
    return io


def wait_for_saves(io: CheckpointIO) -> None:
    """Return when what a plugin saves beside training is saved; ``AsyncCheckpointIO`` can only be torn down.

    Raises:
        BaseException: What it met while it saved.
    """
    beside = _saves_beside_training(io)
    if beside is not None and beside._executor is not None:
        beside._executor.submit(lambda: None).result()
        if beside._error is not None:
            raise beside._error


def after_saves(io: CheckpointIO, action: Callable[[], None]) -> None:
    """Call ``action`` when all is saved that a plugin was told to: now, or beside training, unless a save failed.

    ``AsyncCheckpointIO`` saves later but removes at once, so the old checkpoint would go before the new one is there.
    """
    beside = _saves_beside_training(io)
    if beside is None or beside._executor is None:
        action()
        return

    def act() -> None:
        if beside._error is None:
            try:
                action()
            except BaseException as error:
                beside._error = error

    beside._executor.submit(act)


def _saves_beside_training(io: CheckpointIO | None) -> AsyncCheckpointIO | None:
    while isinstance(io, _WrappingCheckpointIO):
        if isinstance(io, AsyncCheckpointIO):
            return io
        io = io.checkpoint_io
    return None


def local_tensor(tensor: DTensor) -> Tensor:
    """What this rank holds of a DTensor; ``to_local`` makes a new tensor of a parameter on every call."""
    local: Tensor = tensor._local_tensor
    return local


def fully_sharded_modules(module: nn.Module) -> list[Any]:
    """The modules to which ``fully_shard`` was applied; their class has been moved."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


def register_bucket_hook(model: DistributedDataParallel, reduce: Callable[[Any], Future[Tensor]]) -> None:
    """Let ``reduce`` take each bucket of gradients. DDP compares the annotated types themselves, not their names."""

    def hook(_: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        return reduce(bucket)

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}  # type: ignore[attr-defined]
    model.register_comm_hook(None, hook)


class FabricSyncControl(_BackwardSyncControl):
    """``Fabric.no_backward_sync``, also for a module that is not in DDP because its node has nobody to reduce with."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if enabled and isinstance(module, DistributedDataParallel):
            context: AbstractContextManager[None] = module.no_sync()
            return context
        return nullcontext()


def time_buffer_broadcasts(model: DistributedDataParallel, waiting: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter ``waiting()`` while DDP broadcasts buffers, before each forward pass: it has no hook for that."""
    _require_attribute(model, "_sync_buffers")
    original: Callable[[], None] = model._sync_buffers

    def sync_buffers() -> None:
        with waiting():
            original()

    model.__dict__["_sync_buffers"] = sync_buffers


@contextmanager
def unprofiled() -> Iterator[None]:
    """Keep torch's profiler from recording what this thread does.

    A move that is launched while the profiler records, and ends beside training when it has stopped, would write to a
    record that is gone: a segmentation fault.
    """
    if not torch.autograd.profiler._is_profiler_enabled:  # the process's; not all modes show in the thread's own flag
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def _require_attribute(owner: object, name: str) -> None:
    if not hasattr(owner, name):
        raise RuntimeError(
            f"this version of Lightning or torch has no {type(owner).__name__}.{name}, which this version of"
            " lightning-hiercomm relies on: upgrade it, or go back to an earlier Lightning, and report this."
        )
