"""Buffers that DDP broadcasts before a forward pass, where a rank may have others than the rank that sends them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hiercomm.comm import streams


class _Slot(NamedTuple):
    """What a buffer must be to be broadcast."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, buffer: Tensor) -> _Slot:
        return cls(tuple(buffer.shape), buffer.dtype, buffer.device.type)

    def fits(self, buffer: Tensor) -> bool:
        return buffer.shape == self.shape and buffer.dtype is self.dtype and buffer.device.type == self.device


class BufferBroadcast:
    """Broadcasts a module's buffers in a layout that all ranks of a group know: names, shapes and dtypes.

    DDP by itself broadcasts whatever buffers a rank has at the moment. Where the first rank has more than another rank
    expects, gloo ends that process; where it has less, a part of a buffer is overwritten.

    Here a flag travels with the values. If the buffers of the sending rank no longer have the layout, it is set, no
    rank takes any value, and the new layout is sent before the values. A rank takes the buffers that it has in the same
    shape and dtype; its others stay its own. On a GPU the host would wait to read the flag: there all of this happens
    with the next broadcast.

    Args:
        buffers: Equal in name, shape and dtype on all ranks.
    """

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._layout = {name: _Slot.of(buffer) for name, buffer in buffers.items()}
        self._fits = True
        self._selected: list[Tensor] = []
        self._flag: tuple[Tensor, torch.cuda.Event] | None = None  # of the last broadcast, on its way to the host

    def select(self, buffers: Mapping[str, Tensor], ignored: set[str]) -> list[Tensor]:
        """Find the buffers of the layout, in its order; new tensors stand for those that this rank does not have.

        Args:
            buffers: All that there are now, without those to ignore.
            ignored: Names of those that no rank broadcasts any more.
        """
        if not ignored.isdisjoint(self._layout):
            self._layout = {name: slot for name, slot in self._layout.items() if name not in ignored}
        self._fits = len(buffers) == len(self._layout)
        self._selected = []
        device = next((buffer.device for buffer in buffers.values()), torch.device("cpu"))
        for name, slot in self._layout.items():
            buffer = buffers.get(name)
            if buffer is None or not slot.fits(buffer):
                self._fits = False
                place = device if device.type == slot.device else torch.device(slot.device)
                buffer = torch.zeros(slot.shape, dtype=slot.dtype, device=place)
            self._selected.append(buffer)
        return self._selected

    def __call__(self, group: Any, source: int, buffers: Mapping[str, Tensor]) -> None:
        """Broadcast the selected buffers.

        Args:
            group: The process group.
            source: The rank in the group that sends.
            buffers: All that there are now, without those to ignore.
        """
        if self._flag is not None:
            flag, is_read = self._flag
            self._flag = None
            is_read.synchronize()
            if bool(flag):
                self._follow(group, source, buffers)
        sent = self._broadcast(group, source)
        if sent is None:
            return
        if streams.has(sent.device):
            self._flag = streams.to_host(sent), streams.mark(sent.device)
        elif bool(sent):
            self._follow(group, source, buffers)
            self._broadcast(group, source)

    def _follow(self, group: Any, source: int, buffers: Mapping[str, Tensor]) -> None:
        """Take the layout of the sending rank."""
        told = [{name: _Slot.of(buffer) for name, buffer in buffers.items()}]
        dist.broadcast_object_list(told, dist.get_global_rank(group, source), group)
        (self._layout,) = told
        self.select(buffers, set())

    def _broadcast(self, group: Any, source: int) -> Tensor | None:
        """Broadcast values, to be taken unless the layout of the sending rank is new.

        Returns:
            Whether it is; a scalar. None if there are no buffers.
        """
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for buffer in self._selected:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        sends = dist.get_rank(group) == source
        sent = [_Sent(tensors, sends and not self._fits, group, source) for tensors in kinds.values()]
        flags = [each.wait() for each in sent]
        if not sends:
            for each in sent:
                each.take()
        return flags[0] if flags else None


class _Sent:
    """Buffers of one dtype on their way, and the flag behind them."""

    def __init__(self, buffers: Sequence[Tensor], is_new: bool, group: Any, source: int) -> None:
        self._buffers = buffers
        parts = [buffer.reshape(-1) for buffer in buffers]
        self._flat = torch.cat([*parts, parts[0].new_full((1,), is_new)])
        self._work = dist.broadcast(self._flat, dist.get_global_rank(group, source), group, async_op=True)

    def wait(self) -> Tensor:
        """Return the flag, for the current stream."""
        if self._work is not None:
            self._work.wait()
        return self._flat[-1] != 0

    def take(self) -> None:
        """Write what came to the buffers, unless the flag is set."""
        flag = self._flat[-1] != 0
        *values, _ = self._flat.split([*(buffer.numel() for buffer in self._buffers), 1])
        if streams.has(flag.device):
            own = torch.cat([buffer.reshape(-1) for buffer in self._buffers])
            values = list(torch.where(flag, own, self._flat[:-1]).split([buffer.numel() for buffer in self._buffers]))
        elif bool(flag):
            return
        shaped = [each.view(buffer.shape) for each, buffer in zip(values, self._buffers, strict=True)]
        torch._foreach_copy_(list(self._buffers), shaped)
