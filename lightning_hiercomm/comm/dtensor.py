"""Helpers for torch's sharded tensors, and names that older versions keep private."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

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

__all__ = ["DTensor", "Shard", "distribute_tensor", "fully_sharded_modules", "gathered", "is_whole", "local", "whole"]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, the same object each time, unlike ``DTensor.to_local``; or the plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_whole(tensor: Tensor) -> bool:
    """Whether this rank holds the whole tensor."""
    return not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements)


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole tensor as a plain one; collective over the ranks with shards of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(held: Tensor, like: Tensor) -> Tensor:
    """Return the DTensor with this rank's shard ``held`` and the layout of ``like``."""
    if not isinstance(like, DTensor):
        return held
    return DTensor.from_local(
        held, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def fully_sharded_modules(module: nn.Module) -> list[Any]:
    """Return the modules to which ``fully_shard`` was applied."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]
