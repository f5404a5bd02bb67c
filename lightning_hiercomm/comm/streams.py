"""What a device does later than the program says it: streams, events, and memory that several streams use.

A CUDA device (AMD's GPUs go by that name, too) takes work in streams, each of which it does in order. Between streams
there is no order but what events make, and memory that a tensor gives back is used again in the order of the stream in
which it was made, whoever still reads it ("CUDA streams" in https://docs.pytorch.org/docs/stable/notes/cuda.html).

All that the package asks of streams goes through here: there is one place to read, and tests put a device in its place
that tells who used what without order (``tools/fake_streams.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor


def has(device: torch.device) -> bool:
    """Whether a device works in streams: a look at a value then waits for all that its stream has still to do."""
    return device.type == "cuda"


def check_known(device: torch.device) -> None:
    """See that it is known in which order a device works.

    Raises:
        ValueError: If not, saying what to train on.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"nodes exchange in parallel with training, which needs the order of a device's streams, and that of"
            f" {device.type!r} devices is not known here: train with Trainer(accelerator='gpu') on NVIDIA's or AMD's"
            " GPUs, or with Trainer(accelerator='cpu'), or without this strategy"
        )


def work_for(device: torch.device) -> None:
    """Let this thread work for a device: a new one works for the first, and would claim memory of it."""
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(device)


def new(device: torch.device) -> torch.cuda.Stream:
    """A stream of its own."""
    return torch.cuda.Stream(device)


def current(device: torch.device) -> torch.cuda.Stream:
    """What this thread's work for the device goes to."""
    return torch.cuda.current_stream(device)


def within(stream: torch.cuda.Stream) -> AbstractContextManager[object]:
    """Let this thread's work go to another stream."""
    return torch.cuda.stream(stream)


def mark(device: torch.device, timing: bool = False) -> torch.cuda.Event:
    """An event that happens when the current stream has done all it has got so far."""
    event = torch.cuda.Event(enable_timing=timing)
    event.record(current(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if has(device):
        torch.cuda.synchronize(device)


def keep_for(stream: torch.cuda.Stream, *tensors: Tensor) -> None:
    """Let a stream use tensors that another has made: their memory is not used again before it has.

    The allocator knows of the stream only in which a tensor was made
    (https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html): without this call, the next tensor
    of that stream may get the memory while the work that reads it still waits in the other one. What counts is the work
    that the stream has when the tensor goes, so it may be called before that work is there.

    It holds for the memory that the tensor has now: a storage that is resized to nothing and back
    (``untyped_storage().resize_``) has new memory, of which the other stream must be told again. Where somebody waits
    for the other stream before the tensor goes, an event does the same without the allocator's bookkeeping, which keeps
    memory until it happens to look ("Tensor.record_stream" above); a run that breaks off does not wait.
    """
    for tensor in tensors:
        if has(tensor.device):
            tensor.record_stream(stream)


def keep_here(*tensors: Tensor) -> None:
    """As :func:`keep_for`, for the current stream."""
    for tensor in tensors:
        if has(tensor.device):
            keep_for(current(tensor.device), tensor)


def host_memory(tensor: Tensor) -> Tensor:
    """Room for a copy of a tensor in the host's memory, pinned, as copies need it for which nobody is to wait.

    The allocator keeps pinned memory that was given back, and uses it again when the streams that copied from or to it
    have done so (``CachingHostAllocator`` in torch's ``ATen/cuda``: ``copy_`` notes an event there); nothing else has
    to be kept for them. What a thread of the host still reads or writes, it must hold itself.
    """
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy of a tensor in the host's memory, there when the current stream has made it; nobody waits for that.

    What is read before an event says that the copy has ended is anything
    (https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html).
    """
    return host_memory(tensor).copy_(tensor, non_blocking=True)
