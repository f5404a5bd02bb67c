"""Parameters and buffers that a module tells DDP to ignore, so that each rank keeps its own."""

from __future__ import annotations

from torch import nn

NAMES = "_ddp_params_and_buffers_to_ignore"
"""The attribute that DDP reads; ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` sets it."""


def ignored_by_ddp(module: nn.Module) -> set[str]:
    """Return all names of the tensors that DDP ignores: experts or tables of each rank, say.

    Like DDP, it compares the first name of a tensor with those that the module lists.
    """
    listed = set(getattr(module, NAMES, ()))
    if not listed:
        return listed
    first = (*module.named_parameters(), *module.named_buffers())
    ignored = {id(tensor) for name, tensor in first if name in listed}
    everywhere = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {name for name, tensor in everywhere if id(tensor) in ignored}
