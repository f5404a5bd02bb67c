"""Every private or fragile touch of Lightning and torch: one function each, each with its reason and its test."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.load import _METADATA_FILENAME as METADATA_FILENAME
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import RunningStage, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
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

    def validate(num_devices: int, num_nodes: int) -> None:
        if num_devices != ranks:
            raise ValueError(
                f"Trainer(devices={num_devices}), but {ranks} ranks were started on this node: give devices={ranks}"
                " here. Nodes may have unequal numbers of ranks."
            )

    environment.validate_settings = validate  # type: ignore[method-assign]


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


def local_tensor(tensor: DTensor) -> Tensor:
    """What this rank holds of a DTensor; ``to_local`` makes a new tensor of a parameter on every call."""
    local: Tensor = tensor._local_tensor
    return local


def fully_sharded_modules(module: nn.Module) -> list[Any]:
    """The modules to which ``fully_shard`` was applied; their class has been moved."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


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
            f"this version of Lightning or torch has no {type(owner).__name__}.{name}; lightning-hiercomm was made for"
            " lightning 2.6. Please install 'lightning>=2.6.1,<2.7' and report this."
        )
