"""Time collectives on all ranks at once: seconds and processor time."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.base import Communicator, Handle, finished
from lightning_hiercomm.planning.cluster import Collective, CostCurve, sent_bytes
from lightning_hiercomm.schemes.reducers.graphs import RandomPermutation, round_of

IN_FLIGHT = 3
"""Collectives in flight; with a single one, the time of waking a thread would dominate."""

_COLD = 2**26  # bytes of tensors that are used in turn, so that none is in a cache, as in training
_MOST_TURNS = 1024
_BLOCKS = 3  # the median excludes other load of the machine
_SMALLEST = 16  # bytes: all latency
_LONGEST = 1.0
_CROWDED = 0.6  # share of a node's processors in use; the kernel uses the others
_NEVER_QUEUED = 0.95  # share of the time in which a runnable thread ran

StartCollective = Callable[[int], Handle]
"""Starts the i-th of many collectives."""


@dataclass(frozen=True)
class Timing:
    """The time of one of many repetitions.

    Attributes:
        seconds: On the slowest rank.
        processor_seconds: Of all threads, on the average rank.
        queued_seconds: In which threads waited for a processor, on the average rank.
    """

    seconds: float
    processor_seconds: float
    queued_seconds: float = 0.0

    def running(self, threads: int) -> float:
        """Return the fraction of the time in which ``threads`` runnable threads did run."""
        could_run = min(self.processor_seconds + self.queued_seconds, threads * self.seconds)
        return min(1.0, self.processor_seconds / could_run) if could_run else 0.0


@dataclass(frozen=True)
class ProcessorShare:
    """The processors of the ranks of a node.

    Attributes:
        processors: Number for all of them; None if no rank waits for one.
        ranks: Number of ranks.
    """

    processors: float | None
    ranks: int

    @classmethod
    def found(cls, cores: float, steps: Sequence[Timing], threads: int) -> ProcessorShare:
        """Derive the share from simultaneous steps of all ranks with ``threads`` threads each, on ``cores`` cores."""
        ranks = len(steps)
        if cores >= 2 * ranks * threads:  # one for training, one for communication
            return cls(None, ranks)
        running = [step.running(threads) for step in steps]
        if min(running) > _NEVER_QUEUED:
            return cls(cores, ranks)
        return cls(min(cores, sum(share * threads for share in running)), ranks)

    def uncrowded(self, timing: Timing) -> Timing:
        """Correct a timing to one with enough processors for every rank."""
        if self.processors is None:
            return timing
        used = self.ranks * timing.processor_seconds / timing.seconds
        if used < _CROWDED * self.processors:
            return timing
        processor_seconds = timing.seconds * self.processors / self.ranks
        return Timing(min(timing.seconds, processor_seconds), processor_seconds)

    def uncrowded_step(self, timing: Timing, threads: int) -> Timing:
        """Correct the timing of a step of ``threads`` threads."""
        if self.processors is None:
            return timing
        seconds = max(timing.seconds - timing.queued_seconds / threads, timing.processor_seconds / threads)
        return Timing(seconds, timing.processor_seconds)


def queued_seconds() -> float:
    """Return the time that all threads of this process waited for a processor; 0 if the system does not tell."""
    total = 0
    for status in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            total += int(status.read_text().split()[1])
    return total * 1e-9


class Stopwatch:
    """Times what all ranks do at once; every call is collective."""

    def __init__(self, world: Communicator, device: torch.device, seconds: float = 0.2) -> None:
        self._world = world
        self._device = device
        self._seconds = seconds
        self._memory = torch.empty(0, device=device)

    def copy(self, size: int) -> Timing:
        """Time a copy of ``size`` bytes."""
        source = torch.ones(max(1, size // 4), device=self._device)
        target = torch.empty_like(source)

        def copy(_: int) -> Handle:
            target.copy_(source)
            return finished

        return self.time(copy)

    def curve(
        self,
        group: Communicator | None,
        members: int,
        sharing: int,
        kind: Collective,
        sizes: Sequence[int],
        share: ProcessorShare,
    ) -> CostCurve:
        """Measure one kind of collective by size.

        Args:
            group: Of this rank; None if it is in none.
            members: Number of ranks in each group.
            sharing: Number of groups that share the link.
            kind: The kind.
            sizes: Bytes of the tensors, ascending. Those that would take too long are left out.
            share: Of the processors.
        """
        points: list[tuple[float, float, float]] = []
        for size in (_SMALLEST * members, *sizes):
            sent = sent_bytes(kind, members, size)
            if len(points) > 1 and CostCurve(members, sharing, tuple(points)).seconds(sent, 1) > _LONGEST:
                break
            timing = share.uncrowded(self.time(_nothing if group is None else self._launch(group, kind, size)))
            points.append((sent, timing.seconds, timing.processor_seconds))
        return CostCurve(members, sharing, tuple(points))

    def time(self, launch: StartCollective) -> Timing:
        """Return the median over blocks of repetitions, with several in flight."""
        self._run(launch, 1)
        few = max(self._world.all_gather_object(self._run(launch, IN_FLIGHT)[0])) / IN_FLIGHT
        count = round(min(max(self._seconds / _BLOCKS / max(few, 1e-7), IN_FLIGHT + 1), 5000))
        repeats = _BLOCKS if few * count < self._seconds else 1
        blocks = [self._world.all_gather_object(self._run(launch, count)) for _ in range(repeats)]
        return Timing(
            median(max(seconds for seconds, _ in everyone) for everyone in blocks) / count,
            median(fmean(processor_seconds for _, processor_seconds in everyone) for everyone in blocks) / count,
        )

    def _run(self, launch: StartCollective, count: int) -> tuple[float, float]:
        self._world.barrier()
        start, processor_start = time.perf_counter(), time.process_time()
        in_flight: deque[Handle] = deque()
        for i in range(count):
            in_flight.append(launch(i))
            if len(in_flight) == IN_FLIGHT:
                in_flight.popleft().wait()
        for handle in in_flight:
            handle.wait()
        streams.synchronize(self._device)
        return time.perf_counter() - start, time.process_time() - processor_start

    def _launch(self, group: Communicator, kind: Collective, size: int) -> StartCollective:
        part = max(1, size // 4 // group.size)
        numel = part * group.size
        turns = min(max(IN_FLIGHT, _COLD // (8 * numel)), _MOST_TURNS)
        wholes, others = (half.unbind() for half in self._zeros(2 * turns * numel).view(2, turns, numel))

        def launch(i: int) -> Handle:
            whole, other = wholes[i % turns], others[i % turns]
            if kind == "all_reduce":
                return group.all_reduce(whole)
            if kind == "reduce_scatter":
                return group.reduce_scatter(other[:part], whole)
            if kind == "all_gather":
                return group.all_gather(whole, other[:part])
            if kind == "broadcast":
                return group.broadcast(whole, source=i % group.size)
            # with the random peers of gossip, which wait for each other
            peers = round_of(RandomPermutation(), group.size, i)
            return group.exchange(
                [(whole, peer) for peer in peers.send_to[group.rank]],
                [(other, peer) for peer in peers.receive_from[group.rank]],
            )

        return launch

    def _zeros(self, numel: int) -> Tensor:
        """Return memory that was written before; the first use of memory is slow."""
        if len(self._memory) < numel:
            self._memory = torch.full((numel,), 0.0, device=self._device)
        return self._memory[:numel]


def _nothing(_: int) -> Handle:
    return finished
