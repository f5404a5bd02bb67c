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

__all__ = ["DTensor", "Shard", "distribute_tensor", "fully_sharded_modules", "local_tensor"]


def local_tensor(tensor: DTensor) -> Tensor:
    """What this rank holds of a DTensor; ``to_local`` makes a new tensor of a parameter on every call."""
    local: Tensor = tensor._local_tensor
    return local


def fully_sharded_modules(module: nn.Module) -> list[Any]:
    """The modules to which ``fully_shard`` was applied; their class has been moved."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]
