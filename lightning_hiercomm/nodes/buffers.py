"""Finds buffers again after layers replaced them, as in ``self.mean = 0.9 * self.mean + ...``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_hiercomm.comm.dtensor import is_whole, local, whole

LEAVE_OUT = (
    "Leave it out, so that it stays each rank's own: average_buffers=[...] names the buffers to average. Or register it"
    " with persistent=False"
)


class Home(NamedTuple):
    """The layer and name under which a buffer is registered, and whether checkpoints hold it."""

    layer: nn.Module
    name: str
    is_persistent: bool
    full_name: str

    @property
    def present(self) -> object:
        """The layer's attribute of that name now."""
        return getattr(self.layer, self.name, None)


def is_of_numbers(tensor: Tensor) -> bool:
    """Return whether a mean is meaningful: for floating-point and complex tensors, not for counts and masks."""
    return tensor.is_floating_point() or tensor.is_complex()


def homes_of_buffers(module: nn.Module) -> dict[int, Home]:
    """Map the ``id`` of each local buffer to where it is registered; persistent places take precedence."""
    found = [
        (id(local(buffer)), Home(layer, name, is_persistent(layer, name), f"{prefix}.{name}".removeprefix(".")))
        for prefix, layer in module.named_modules()
        for name, buffer in layer.named_buffers(recurse=False)
    ]
    homes: dict[int, Home] = {}
    for key, home in sorted(found, key=lambda each: not each[1].is_persistent):
        homes.setdefault(key, home)
    return homes


def is_persistent(layer: nn.Module, buffer: str) -> bool:
    """Return whether checkpoints hold a layer's buffer, without running the hooks of its ``state_dict()``."""
    return buffer not in getattr(layer, "_non_persistent_buffers_set", ())  # scripted layers have none


def names_of_directions(module: nn.Module) -> set[str]:
    """Return names of buffers that are unit vectors, those of spectral norm: their mean may be zero."""
    names: set[str] = set()
    for prefix, layer in module.named_modules():
        own = {"_u", "_v"} if isinstance(layer, _SpectralNorm) else set()
        hooks = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        own |= {f"{hook.name}_{which}" for hook in hooks for which in "uv"}
        names |= {f"{prefix}.{name}".removeprefix(".") for name in own}
    return names


class Buffers:
    """Some buffers of a module, by the places where they are registered.

    Args:
        tensors: The buffers, each once; this rank's shards of DTensors.
        homes: Where they are registered; buffers without a home are never replaced.

    Attributes:
        tensors: The buffers as of the last :meth:`find`.
    """

    def __init__(self, tensors: Sequence[Tensor], homes: Mapping[int, Home]) -> None:
        self.tensors = list(tensors)
        self._shapes = [tensor.shape for tensor in tensors]
        self._homes = [homes.get(id(tensor)) for tensor in tensors]

    @torch.no_grad()
    def find(self) -> bool:
        """Find the layers' present buffers; return whether :attr:`tensors` has changed.

        A layer that assigned a new tensor gets a copy of it: schemes write to the buffer from now on, and the original
        may be part of a graph.

        Raises:
            ValueError: If a layer has another shape, dtype or device now.
        """
        before = self.tensors
        present = [_present(*each) for each in zip(before, self._shapes, self._homes, strict=True)]
        if all(new is old for new, old in zip(present, before, strict=True)):
            return False
        strides = {id(tensor): tensor.stride() for tensor in before}
        copies: dict[int, Tensor] = {}  # one for a tensor with several names
        for place, (new, old, home) in enumerate(zip(tuple(present), before, self._homes, strict=True)):
            if home is None or strides.get(id(new)) == old.stride():
                continue
            if id(new) not in copies or local(copies[id(new)]).stride() != old.stride():
                copies[id(new)] = whole(torch.empty_like(old).copy_(new), like=getattr(home.layer, home.name))
            setattr(home.layer, home.name, copies[id(new)])
            present[place] = local(copies[id(new)])
        self.tensors = present
        return True


def _present(before: Tensor, shape: torch.Size, home: Home | None) -> Tensor:
    """Return a layer's present buffer, which must have the shape, dtype and device of before."""
    given = before if home is None else home.present
    if isinstance(given, Tensor) and is_whole(given):
        found = local(given)
        kind = (before.layout, shape, before.dtype, before.device)
        if (found.layout, found.shape, found.dtype, found.device) == kind:
            return found
    now = f"{list(given.shape)}, {given.dtype}" if isinstance(given, Tensor) else repr(given)
    raise ValueError(
        f"buffer {'' if home is None else home.full_name} is averaged over ranks, but changed in training from"
        f" {list(shape)}, {before.dtype} to {now}. {LEAVE_OUT}"
    )
