"""A device that works in streams, played on the CPU: it computes at once, but tells who used what without order.

It takes the place of what ``lightning_hiercomm.comm.streams`` asks of CUDA, so the code for streams runs. Every
operation counts as work of its thread's current stream, and vector clocks say what is ordered: by the stream, by
events, and by what the host has waited for. Three things are trouble:

- two streams use the same elements, one of them writes, and nothing orders them;
- a tensor goes, and a stream other than the one that made it may still have to use it, but did not record its use: the
  next tensor of the stream that made it may get the memory;
- the host reads its copy of something before it knows that the copy has ended.

Where the host waits is counted. Each thread, as a rank, has a device of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hiercomm.comm import streams

Clock = dict[int, int]

_READ_BY_THE_HOST = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "unique_dim", "_unique2", "masked_select"}


def _merge(clock: Clock, other: Clock) -> None:
    for number, reached in other.items():
        clock[number] = max(clock.get(number, 0), reached)


class FakeStream:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name = device, name
        self.number = device.number_of(self)
        self.clock: Clock = {self.number: 0}

    def wait_stream(self, other: FakeStream) -> None:
        with self.device.lock:
            _merge(self.clock, other.clock)

    def wait_event(self, event: FakeEvent) -> None:
        with self.device.lock:
            _merge(self.clock, event.clock)


class FakeEvent:
    """Has happened whenever anybody asks; what it orders is what counts."""

    def __init__(self, device: FakeDevice, timing: bool) -> None:
        self._device = device
        self._timing = timing
        self.made_at = time.perf_counter()
        with device.lock:
            self.clock = dict(device.current().clock)

    def query(self) -> bool:
        self._device.host_knows(self.clock)
        return True

    def synchronize(self) -> None:
        self._device.host_waits("an event", self.clock)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self._timing, "CUDA times only events that were made for it"
        assert end._timing
        return 1e3 * (end.made_at - self.made_at)


@dataclass
class _Use:
    low: int
    high: int
    stream: int
    time: int
    writes: bool
    operation: str


@dataclass
class _Memory:
    storage: StorageWeakRef
    made_in: int
    made_by: _Rank
    uses: list[_Use] = field(default_factory=list)
    kept_for: set[int] = field(default_factory=set)
    on_host: bool = False


class _Rank:
    def __init__(self) -> None:
        self.name = threading.current_thread().name
        self.current: FakeStream | None = None
        self.host: Clock = {}
        self.waits: list[str] = []


class FakeDevice:
    """All ranks' devices.

    Attributes:
        trouble: What was found, in words.
        waits: For what this thread, as the host of its rank, has waited: ``"an event"``, or the name of a stream.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.trouble: list[str] = []
        self._streams: list[FakeStream] = []
        self._memory: dict[int, _Memory] = {}
        self._thread = threading.local()

    @property
    def waits(self) -> list[str]:
        return self._rank.waits

    @property
    def _rank(self) -> _Rank:
        if not hasattr(self._thread, "rank"):
            self._thread.rank = _Rank()
        rank: _Rank = self._thread.rank
        return rank

    def work_for(self, rank: _Rank) -> None:
        """This thread computes for that of a rank, on its stream, as autograd's for a GPU do."""
        self._thread.rank = rank

    def number_of(self, stream: FakeStream) -> int:
        with self.lock:
            self._streams.append(stream)
            return len(self._streams) - 1

    def current(self) -> FakeStream:
        if self._rank.current is None:
            self._rank.current = FakeStream(self, f"training of {self._rank.name}")
        return self._rank.current

    @contextmanager
    def within(self, stream: FakeStream) -> Iterator[None]:
        before, self._rank.current = self.current(), stream
        try:
            yield
        finally:
            self._rank.current = before

    def host_knows(self, clock: Clock) -> None:
        with self.lock:
            _merge(self._rank.host, clock)

    def host_waits(self, what: str, clock: Clock) -> None:
        self.host_knows(clock)
        self._rank.waits.append(what)

    def host_reads(self, tensor: Tensor) -> None:
        with self.lock:
            memory = self._known(tensor)
            if memory is None or not memory.on_host:
                return self.host_waits(self.current().name, self.current().clock)
            for use in memory.uses:
                if use.writes and self._rank.host.get(use.stream, 0) < use.time:
                    self._note(f"the host reads what {self._streams[use.stream].name} may not have copied yet")
        return None

    def keep(self, stream: FakeStream, tensor: Tensor) -> None:
        with self.lock:
            memory = self._known(tensor)
            if memory is not None:
                memory.kept_for.add(stream.number)

    def lies_on_host(self, tensor: Tensor) -> Tensor:
        with self.lock:
            memory = self._known(tensor)
            assert memory is not None
            memory.on_host = True
        return tensor

    # ---- operations ----------------------------------------------------------------------------------------------

    def launch(self, operation: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        with self.lock:
            stream = self.current()
            self._free()
            _merge(stream.clock, self._rank.host)
            stream.clock[stream.number] += 1
            for is_written, tensors in ((False, reads), (True, writes)):
                for tensor in tensors:
                    self._use(tensor, stream, is_written, operation)

    def _use(self, tensor: Tensor, stream: FakeStream, writes: bool, operation: str) -> None:
        memory = self._known(tensor)
        if memory is None or not tensor.numel():
            return
        low = tensor.storage_offset() * tensor.element_size()
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        high = low + (reach + 1) * tensor.element_size()
        kept: list[_Use] = []
        for use in memory.uses:
            overlaps = use.low < high and low < use.high
            is_ordered = stream.clock.get(use.stream, 0) >= use.time
            if overlaps and (writes or use.writes) and not is_ordered:
                other = self._streams[use.stream].name
                self._note(
                    f"{stream.name} {'writes to' if writes else 'reads'} ({operation}) what {other}"
                    f" {'writes to' if use.writes else 'reads'} ({use.operation}), and nothing orders them"
                )
            is_covered = is_ordered and low <= use.low and use.high <= high
            if not (is_covered and (writes or not use.writes)):
                kept.append(use)
        memory.uses = [*kept, _Use(low, high, stream.number, stream.clock[stream.number], writes, operation)]

    def _known(self, tensor: Tensor) -> _Memory | None:
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
            return None
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            memory = self._memory[storage._cdata] = _Memory(StorageWeakRef(storage), self.current().number, self._rank)
        return memory

    def _free(self) -> None:
        expired = torch.UntypedStorage._expired  # what StorageWeakRef asks in the end, a hundred times an operation
        for key in [key for key, memory in self._memory.items() if expired(memory.storage.cdata)]:
            memory = self._memory.pop(key)
            made_in = self._streams[memory.made_in]
            for use in [] if memory.on_host else memory.uses:
                # a stream that has waited, or a host, after which nothing is launched that could be there before
                is_known_to_end = any(c.get(use.stream, 0) >= use.time for c in (made_in.clock, memory.made_by.host))
                if use.stream != memory.made_in and use.stream not in memory.kept_for and not is_known_to_end:
                    self._note(
                        f"memory that {made_in.name} made may be used again while {self._streams[use.stream].name}"
                        f" {'writes to' if use.writes else 'reads'} it ({use.operation})"
                    )

    def _note(self, trouble: str) -> None:
        if trouble not in self.trouble:
            self.trouble.append(trouble)

    # ---- in the place of CUDA ------------------------------------------------------------------------------------

    @contextmanager
    def installed(self) -> Iterator[FakeDevice]:
        """Let the package take the CPU for this device.

        Operations of a thread count while it is :meth:`watching`.
        """
        with pytest.MonkeyPatch.context() as patch:
            for name, stands_in in {
                "has": lambda device: True,
                "new": lambda device: FakeStream(self, f"a stream of {threading.current_thread().name}"),
                "current": lambda device: self.current(),
                "within": self.within,
                "mark": lambda device, timing=False: FakeEvent(self, timing),
                "synchronize": lambda device: self.host_waits("everything", self.current().clock),
                "keep_for": lambda stream, *tensors: [self.keep(stream, tensor) for tensor in tensors],
                "host_memory": lambda tensor: self.lies_on_host(torch.empty_like(tensor, device="cpu")),
            }.items():
                patch.setattr(streams, name, stands_in)
            to_list = Tensor.tolist  # reads the memory itself, by no operation

            def tolist(tensor: Tensor) -> Any:
                if any(isinstance(mode, _Watching) for mode in _modes()):
                    self.host_reads(tensor)
                return to_list(tensor)

            patch.setattr(Tensor, "tolist", tolist)
            yield self

    @contextmanager
    def watching(self) -> Iterator[None]:
        """This thread is the host of a rank: what it computes is work for streams."""
        with _Watching(self):
            yield


def _modes() -> list[Any]:
    return torch.utils._python_dispatch._get_current_dispatch_mode_stack()


class _Watching(TorchDispatchMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device
        self._rank = device._rank

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._device.work_for(self._rank)
        result = operation(*args, **kwargs)
        schema = operation._schema
        name = operation.overloadpacket.__name__
        given: list[tuple[Any, Any]] = list(zip(schema.arguments, args, strict=False))
        given += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]

        def tensors(which: Callable[[Any], bool]) -> list[Tensor]:
            return [
                t for argument, value in given if which(argument) for t in tree_leaves(value) if isinstance(t, Tensor)
            ]

        if name == "lift_fresh":  # torch.tensor([1, 2]), x[0] = 1: copied to the device, and waited for
            self._device.waits.append(self._device.current().name)
        is_view = any(argument.alias_info is not None and not argument.alias_info.is_write for argument, _ in given)
        if is_view or name in ("empty", "empty_like", "new_empty", "empty_strided", "set_"):
            for made in tree_leaves(result):
                if isinstance(made, Tensor):
                    with self._device.lock:
                        self._device._known(made)
            return result
        written = tensors(lambda argument: argument.alias_info is not None and argument.alias_info.is_write)
        read = tensors(lambda argument: argument.alias_info is None)
        if name in _READ_BY_THE_HOST:
            for tensor in read:
                self._device.host_reads(tensor)
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and not any(t is w for w in written)]
        self._device.launch(name, read, [*written, *made])
        return result
