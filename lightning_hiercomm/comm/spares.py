"""Reusable memory for messages and calculations."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams

_MOST_KEPT = 2**26


class _Thread(threading.local):
    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]] = {}


_thread = _Thread()


class Spares:
    """A pool of 1-D CPU tensors, of at most 64 MiB. On other devices torch has its own.

    New memory costs a page fault for every 4 KiB, which takes longer than writing them.
    """

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a 1-D tensor of ``numel`` elements with undefined contents."""
        if _keeps_freed(device):
            return torch.empty(numel, dtype=dtype, device=device)
        needed = numel * dtype.itemsize
        with self._lock:
            fitting = [place for place, spare in enumerate(self.kept) if needed <= spare.nbytes < 2 * needed]
            if fitting:
                spare = self.kept.pop(min(fitting, key=lambda place: self.kept[place].nbytes))
            else:
                spare = torch.empty(needed, dtype=torch.uint8)
        return spare[:needed].view(dtype)

    @contextmanager
    def lend(self, numel: int, dtype: torch.dtype, device: torch.device) -> Iterator[Callable[[], Tensor]]:
        """Return a function that takes tensors, which the end of the context gives back."""
        lent: list[Tensor] = []

        def take() -> Tensor:
            lent.append(self.take(numel, dtype, device))
            return lent[-1]

        yield take
        for taken in lent:
            self.give_back(taken)

    def give_back(self, taken: Tensor) -> None:
        """Return a tensor that is no longer used."""
        if _keeps_freed(taken.device) or not taken.numel():
            return
        spare = torch.empty(0, dtype=torch.uint8).set_(taken.untyped_storage())
        with self._lock:
            self.kept.append(spare)
            while sum(kept.nbytes for kept in self.kept) > _MOST_KEPT:
                self.kept.pop(0)


def scratch(role: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor for one calculation of this thread; the next call for the same role and type reuses its memory.

    On devices other than the CPU, the tensor is new.
    """
    if _keeps_freed(device):
        return torch.empty(shape, dtype=dtype, device=device)
    kept, latest = _thread.held.get((role, dtype), (None, None))
    if latest is not None and latest.shape == shape:
        return latest
    numel = math.prod(shape)
    with torch.inference_mode(False):  # tensors of inference mode cannot be written outside of it
        if kept is None or kept.numel() < numel:
            kept = torch.empty(numel, dtype=dtype)
        latest = kept[:numel].view(shape)
    _thread.held[role, dtype] = kept, latest
    return latest


def _keeps_freed(device: torch.device) -> bool:
    """Whether torch pools memory of the device."""
    return device.type != "cpu" or streams.has(device)
