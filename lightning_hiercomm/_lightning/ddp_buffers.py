"""Broadcasts buffers before a forward pass of DDP, also if buffers differ in shape between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _broadcast_coalesced  # type: ignore[attr-defined]

from lightning_hiercomm.comm import streams


class _Slot(NamedTuple):
    """The properties of a buffer that is broadcast.

    Attributes:
        is_fixed: Whether it belongs to one of torch's own layers, which never change the shape of a buffer.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    is_fixed: bool

    def fits(self, buffer: Tensor) -> bool:
        return buffer.shape == self.shape and buffer.dtype is self.dtype and buffer.device.type == self.device


class BufferBroadcast:
    """Broadcasts a module's buffers in a layout that all ranks of a group know: names, shapes and dtypes.

    DDP itself broadcasts the present buffers of each rank. If the first rank has more data than another one expects,
    gloo ends that process. If it has less, a part of a buffer is overwritten.

    This class sends a flag with the values. The sender sets it if its buffers no longer have the layout, and then sends
    the new layout before the values again. A rank takes the buffers that it has in the same shape and dtype, and keeps
    its others. On a GPU, where reading the flag would make the host wait, it sends the new layout before the next
    broadcast.
    """

    def __init__(self, module: nn.Module, ignored: set[str]) -> None:
        self._module = module
        self._layout = self._present_layout(ignored)
        self._fits = False
        self._selected: list[Tensor] = []
        self._flag: tuple[Tensor, torch.cuda.Event] | None = None  # of the last broadcast

    def select(self, buffers: Mapping[str, Tensor], ignored: set[str]) -> list[Tensor]:
        """Select the buffers of the layout in its order; new tensors replace those that this rank lacks."""
        if not ignored.isdisjoint(self._layout):
            self._layout = {name: slot for name, slot in self._layout.items() if name not in ignored}
            self._fits = False
        if self._fits and len(buffers) == len(self._layout) and all(map(is_, buffers.values(), self._selected)):
            # checking the many buffers of torch's layers would take as long as the broadcast
            held = zip(self._selected, self._layout.values(), strict=True)
            if all(slot.fits(own) for own, slot in held if not slot.is_fixed):
                return self._selected
        self._fits = len(buffers) == len(self._layout)
        self._selected = [
            buffer if (buffer := buffers.get(name)) is not None and slot.fits(buffer) else self._stand_in(slot)
            for name, slot in self._layout.items()
        ]
        return self._selected

    def _stand_in(self, slot: _Slot) -> Tensor:
        self._fits = False
        here = [p.device for p in self._module.parameters() if p.device.type == slot.device]
        return torch.zeros(slot.shape, dtype=slot.dtype, device=here[0] if here else slot.device)

    def __call__(self, group: Any, bytes_at_once: int, source: int, ignored: set[str]) -> None:
        """Broadcast the selected buffers."""
        if self._flag is not None:
            flag, is_read = self._flag
            self._flag = None
            is_read.synchronize()
            if flag:
                self._follow(group, source, ignored)
        if not self._selected:
            return
        flag = self._broadcast(group, bytes_at_once, source)
        if streams.has(flag.device):
            self._flag = streams.to_host(flag), streams.mark(flag.device)
        elif flag:
            self._follow(group, source, ignored)
            self._broadcast(group, bytes_at_once, source)

    def _follow(self, group: Any, source: int, ignored: set[str]) -> None:
        """Take the layout of the sending rank."""
        layouts = [self._present_layout(ignored)]
        dist.broadcast_object_list(layouts, dist.get_global_rank(group, source), group)
        (self._layout,) = layouts
        self._fits = False
        self.select({name: b for name, b in self._module.named_buffers() if name not in ignored}, set())

    def _present_layout(self, ignored: set[str]) -> dict[str, _Slot]:
        fixed = {
            f"{prefix}.{name}".removeprefix(".")
            for prefix, layer in self._module.named_modules()
            for name in layer._buffers
            if type(layer).__module__.startswith("torch.nn.")
        }
        return {
            name: _Slot(tuple(buffer.shape), buffer.dtype, buffer.device.type, name in fixed)
            for name, buffer in self._module.named_buffers()
            if name not in ignored
        }

    def _broadcast(self, group: Any, bytes_at_once: int, source: int) -> Tensor:
        """Broadcast values, which a rank takes unless the sender has a new layout; return whether it has."""
        flag = self._selected[0].new_full((1,), not self._fits)
        if group.rank() == source:
            _broadcast_coalesced(group, [*self._selected, flag], bytes_at_once, source)
            return flag
        free = [place for place, slot in enumerate(self._layout.values()) if not slot.is_fixed]
        received = [*self._selected, flag]
        for place in free:
            received[place] = torch.empty_like(received[place])
        _broadcast_coalesced(group, received, bytes_at_once, source)
        for place in free:
            own, new = self._selected[place], received[place]
            if streams.has(flag.device):
                own.copy_(torch.where(flag != 0, own, new.to(own.device)))
            elif not flag:
                own.copy_(new)
        return flag
