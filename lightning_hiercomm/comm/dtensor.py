"""What torch's sharded tensors hold; names that were private in earlier versions."""

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
    """What this rank holds of a tensor: the same object whenever it is asked for; of a plain tensor, itself.

    ``DTensor.to_local`` makes a new tensor of a parameter on every call.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_whole(tensor: Tensor) -> bool:
    """Whether this rank holds all of it."""
    return not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements)


def gathered(tensor: Tensor) -> Tensor:
    """All of it, as a plain tensor; collective over those who hold parts of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(held: Tensor, like: Tensor) -> Tensor:
    """Return the DTensor with this rank's shard ``held`` and the layout of ``like``."""
    if not isinstance(like, DTensor):
        return held
    return DTensor.from_local(
        held, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def fully_sharded_modules(module: nn.Module) -> list[Any]:
    """The modules to which ``fully_shard`` was applied; their class has been moved."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]
