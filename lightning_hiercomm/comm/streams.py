"""CUDA streams, events, and memory that several streams use.

Streams of a CUDA device (or of an AMD GPU) have no order except by events. Freed memory is reused in the order of the
stream that allocated it, even if another stream still reads it ("CUDA streams" in
https://docs.pytorch.org/docs/stable/notes/cuda.html).

The package uses streams through this module only, so that tests can replace it by a fake device that detects uses
without order (``tests/support/fake_streams.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor


def has(device: torch.device) -> bool:
    """Whether a device has streams, so that reading a value waits for all work of its stream."""
    return device.type == "cuda"


def check_known(device: torch.device) -> None:
    """Raise a ValueError for devices whose streams the package does not support."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"collectives in parallel with training are not supported on {device.type!r} devices: use"
            " Trainer(accelerator='gpu') on NVIDIA or AMD GPUs, Trainer(accelerator='cpu'), or another strategy"
        )


def work_for(device: torch.device) -> None:
    """Set this thread's device; a new thread would use, and allocate memory on, the first one."""
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(device)


def new(device: torch.device) -> torch.cuda.Stream:
    """Create a stream."""
    return torch.cuda.Stream(device)


def current(device: torch.device) -> torch.cuda.Stream:
    """Return this thread's current stream."""
    return torch.cuda.current_stream(device)


def within(stream: torch.cuda.Stream) -> AbstractContextManager[object]:
    """Make a stream the current one in the context."""
    return torch.cuda.stream(stream)


def mark(device: torch.device, timing: bool = False) -> torch.cuda.Event:
    """Record an event behind the present work of the current stream."""
    event = torch.cuda.Event(enable_timing=timing)
    event.record(current(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if has(device):
        torch.cuda.synchronize(device)


def keep_for(stream: torch.cuda.Stream, *tensors: Tensor) -> None:
    """Keep the memory of tensors that another stream has allocated until a stream has used them.

    Otherwise the allocating stream may reuse the memory of a freed tensor while the other one still reads it
    (https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html). The work that counts is that of
    the stream when the tensor is freed, so this may be called before that work is enqueued.

    An event would do the same if the host waited for the other stream before it frees the tensor, which an aborted run
    does not.
    """
    for tensor in tensors:
        if has(tensor.device):
            tensor.record_stream(stream)


def keep_here(*tensors: Tensor) -> None:
    """Call :func:`keep_for` with the current stream."""
    for tensor in tensors:
        if has(tensor.device):
            keep_for(current(tensor.device), tensor)


def host_memory(tensor: Tensor) -> Tensor:
    """Return an uninitialized tensor in pinned host memory, for an asynchronous copy of a tensor.

    torch reuses freed pinned memory only after streams have finished their copies (``CachingHostAllocator``). Threads
    of the host must keep a reference while they use it.
    """
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def to_host(tensor: Tensor) -> Tensor:
    """Start to copy a tensor to pinned host memory in the current stream; wait for an event before reading it.

    See https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html.
    """
    return host_memory(tensor).copy_(tensor, non_blocking=True)
