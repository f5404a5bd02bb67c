"""Buffers of layers, which may be other tensors by and by: ``self.mean = 0.9 * self.mean + ...``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_hiercomm.comm.dtensor import is_whole, local, whole


class Home(NamedTuple):
    """Where a buffer is registered.

    Attributes:
        layer: The module that registered it.
        name: Its name there.
        is_persistent: Whether checkpoints hold it.
    """

    layer: nn.Module
    name: str
    is_persistent: bool

    @property
    def present(self) -> object:
        """What the layer has under the name now."""
        return getattr(self.layer, self.name, None)


def is_of_numbers(tensor: Tensor) -> bool:
    """Whether a mean can be made of it that is no rounding: it is floating or complex, no count and no mask."""
    return tensor.is_floating_point() or tensor.is_complex()


def homes_of_buffers(module: nn.Module) -> dict[int, Home]:
    """Map the ``id`` of each local buffer to where it is registered; of several places a persistent one counts."""
    found = [
        (id(local(buffer)), Home(layer, name, is_persistent(layer, name)))
        for layer in module.modules()
        for name, buffer in layer.named_buffers(recurse=False)
    ]
    homes: dict[int, Home] = {}
    for key, home in sorted(found, key=lambda each: not each[1].is_persistent):  # which keeps the order otherwise
        homes.setdefault(key, home)
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
    """Some buffers of a module, by the places where they are registered.

    Args:
        tensors: The buffers, each once; of DTensors what this rank holds.
        homes: Where they are registered; those without a home stay what they are.

    Attributes:
        tensors: The buffers as found last.
        replaced: For each buffer, whether its layer now has something of another shape, dtype or device in its place.
    """

    def __init__(self, tensors: Sequence[Tensor], homes: Mapping[int, Home]) -> None:
        self.tensors = list(tensors)
        self.replaced = [False] * len(self.tensors)
        self._shapes = [tensor.shape for tensor in tensors]
        self._homes = [homes.get(id(tensor)) for tensor in tensors]

    @property
    def homes(self) -> dict[int, Home]:
        """As given, by the present tensors."""
        return {id(t): home for t, home in zip(self.tensors, self._homes, strict=True) if home is not None}

    @torch.no_grad()
    def find(self) -> bool:
        """Look where the buffers are, and return whether :attr:`tensors` or :attr:`replaced` has changed.

        A layer that assigned a buffer gets a copy of what it assigned, because schemes write to it from now on, and it
        may be part of a graph, or of something else. A buffer that was replaced by one of another shape, dtype or
        device, perhaps on this rank alone, stays with its layer: the tensor of before stays here. One that was resized
        in place is represented by zeros of its shape before. One that is not persistent is never copied: it is
        computed, perhaps from what only this rank has seen.
        """
        resized = [p for p, (t, s) in enumerate(zip(self.tensors, self._shapes, strict=True)) if t.shape != s]
        if resized:
            self.give_up(resized)
            for place in resized:
                self.replaced[place] = True
            self.find()
            return True
        before, replaced_before = self.tensors, self.replaced
        found = [_present(tensor, home) for tensor, home in zip(before, self._homes, strict=True)]
        present = [old if new is None else new for new, old in zip(found, before, strict=True)]
        # what was given up has no home, and stays replaced until others know
        self.replaced = [
            was_replaced if home is None else new is None
            for new, home, was_replaced in zip(found, self._homes, replaced_before, strict=True)
        ]
        if all(new is old for new, old in zip(present, before, strict=True)):
            return self.replaced != replaced_before
        strides = {id(tensor): tensor.stride() for tensor in before}
        copies: dict[int, Tensor] = {}  # one of what has several names
        for place, (new, old, home) in enumerate(zip(tuple(present), before, self._homes, strict=True)):
            if home is None or strides.get(id(new)) == old.stride():
                continue
            if id(new) not in copies or local(copies[id(new)]).stride() != old.stride():
                copies[id(new)] = whole(torch.empty_like(old).copy_(new), like=getattr(home.layer, home.name))
            setattr(home.layer, home.name, copies[id(new)])
            present[place] = local(copies[id(new)])
        self.tensors = present
        return True

    @torch.no_grad()
    def give_up(self, places: Collection[int]) -> None:
        """Hold zeros, of no layer, instead of some buffers."""
        self.tensors, self._homes, self.replaced = list(self.tensors), list(self._homes), list(self.replaced)
        with torch.inference_mode(False):  # perhaps in a validation; schemes write to them in training
            for place in places:
                self.tensors[place] = self.tensors[place].new_zeros(self._shapes[place])
                self._homes[place], self.replaced[place] = None, False

    def undo_point(self) -> Callable[[], None]:
        """Remember where the buffers are; what is returned undoes :meth:`give_up`."""
        tensors, homes, replaced = self.tensors, self._homes, self.replaced

        def undo() -> None:
            self.tensors, self._homes, self.replaced = tensors, homes, replaced

        return undo


def _present(before: Tensor, home: Home | None) -> Tensor | None:
    """The buffer that has replaced a layer's earlier one; None if it has another shape, dtype or device."""
    given = before if home is None else home.present
    if given is before:
        return before
    if not isinstance(given, Tensor) or not is_whole(given):
        return None
    found = local(given)
    if found is before:
        return before
    kind = (before.layout, before.shape, before.dtype, before.device)
    if (found.layout, found.shape, found.dtype, found.device) != kind:
        return None
    return found if home is not None and home.is_persistent else before
