"""Buffers of layers, which may be other tensors by and by: ``self.mean = 0.9 * self.mean + ...``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_hiercomm.comm.dtensor import is_whole, local, whole

Home = tuple[nn.Module, str]
"""A layer, and the name of one of its buffers."""


def is_of_numbers(tensor: Tensor) -> bool:
    """Whether a mean can be made of it that is no rounding: it is floating or complex, no count and no mask."""
    return tensor.is_floating_point() or tensor.is_complex()


def homes_of_buffers(module: nn.Module) -> dict[int, Home]:
    """Where buffers are to be found that layers may assign anew, by the local tensor's ``id``; of several the first.

    Those that files do not hold (``persistent=False``) are left out: they are computed, perhaps from what only this
    rank has seen.
    """
    homes: dict[int, Home] = {}
    for layer in module.modules():
        for name, buffer in layer.named_buffers(recurse=False):
            if is_persistent(layer, name):
                homes.setdefault(id(local(buffer)), (layer, name))
    return homes


def is_persistent(layer: nn.Module, buffer: str) -> bool:
    """Whether files hold a layer's buffer. To look at its ``state_dict()`` would run the hooks of whoever has some."""
    return buffer not in getattr(layer, "_non_persistent_buffers_set", ())  # scripted layers have none


def names_of_directions(module: nn.Module) -> set[str]:
    """Names of buffers that are unit vectors: of nodes whose vectors are opposite the mean has no direction.

    They are those of spectral norm, in both of torch's ways, which divides the weights by what it finds along them.
    """
    names: set[str] = set()
    for prefix, layer in module.named_modules():
        own = {"_u", "_v"} if isinstance(layer, _SpectralNorm) else set()
        hooks = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        own |= {f"{hook.name}_{which}" for hook in hooks for which in "uv"}
        names |= {f"{prefix}.{name}".removeprefix(".") for name in own}
    return names


class Buffers:
    """Some buffers of a module, by the places where they are.

    Args:
        tensors: The buffers, each once; of DTensors what this rank holds.
        homes: Where those are that layers may assign anew; the others stay what they are.

    Attributes:
        tensors: The buffers as found last.
    """

    def __init__(self, tensors: Sequence[Tensor], homes: Mapping[int, Home]) -> None:
        self.tensors = list(tensors)
        self._shapes = [tensor.shape for tensor in tensors]
        self._homes = [homes.get(id(tensor)) for tensor in tensors]

    @property
    def homes(self) -> dict[int, Home]:
        """As given, by the present tensors."""
        return {id(t): home for t, home in zip(self.tensors, self._homes, strict=True) if home is not None}

    @torch.no_grad()
    def find(self) -> bool:
        """Look where they are, and say whether a layer has assigned one anew.

        Such a layer gets a copy of what it has assigned, for others write to it from now on, and it may be part of a
        graph, or of something else. What is of another shape, type or device, perhaps on this rank alone, is left with
        its layer: the tensor of before stays. Of one that was resized itself zeros take the place, of its shape before.
        """
        before = self.tensors
        if any(tensor.shape != shape for tensor, shape in zip(before, self._shapes, strict=True)):
            self._give_up_resized()
            self.find()
            return True
        present = [_present(tensor, home) for tensor, home in zip(before, self._homes, strict=True)]
        if all(new is old for new, old in zip(present, before, strict=True)):
            return False
        strides = {id(tensor): tensor.stride() for tensor in before}
        copies: dict[int, Tensor] = {}  # one of what has several names
        for place, (new, old, home) in enumerate(zip(tuple(present), before, self._homes, strict=True)):
            if home is None or strides.get(id(new)) == old.stride():
                continue
            if id(new) not in copies or local(copies[id(new)]).stride() != old.stride():
                copies[id(new)] = whole(torch.empty_like(old).copy_(new), like=getattr(*home))
            setattr(*home, copies[id(new)])
            present[place] = local(copies[id(new)])
        self.tensors = present
        return True

    def _give_up_resized(self) -> None:
        kept = [tensor.shape == shape for tensor, shape in zip(self.tensors, self._shapes, strict=True)]
        held = zip(self.tensors, self._shapes, kept, strict=True)
        self.tensors = [tensor if is_kept else tensor.new_zeros(shape) for tensor, shape, is_kept in held]
        self._homes = [home if is_kept else None for home, is_kept in zip(self._homes, kept, strict=True)]


def _present(before: Tensor, home: Home | None) -> Tensor:
    """What a layer has under a buffer's name by now, if it can take the place of what it had before."""
    given = before if home is None else getattr(*home, None)
    if given is before or not isinstance(given, Tensor) or not is_whole(given):
        return before
    found = local(given)
    if found.layout != before.layout:
        return before
    kind = (before.shape, before.dtype, before.device)
    return found if (found.shape, found.dtype, found.device) == kind else before
