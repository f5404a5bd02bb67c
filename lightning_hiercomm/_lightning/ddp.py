"""What Lightning and ours want of ``DistributedDataParallel``: one function a touch, with its reason."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_hiercomm._lightning import require_attribute


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


def keep_sync_batchnorm_in_group(module: nn.Module, group: Any) -> None:
    """Point SyncBatchNorm layers at a process group; Lightning converts them over the world."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            layer.process_group = group


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
    require_attribute(model, "_sync_buffers")
    original: Callable[[], None] = model._sync_buffers

    def sync_buffers() -> None:
        with waiting():
            original()

    model.__dict__["_sync_buffers"] = sync_buffers
