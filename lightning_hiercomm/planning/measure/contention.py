"""Measure how much collectives and training slow each other down on shared processors.

The operating system counts the threads of a process only. The kernel's work for packets, and the time of waking
threads, belong to no process. So the cost is measured while training and collectives overlap.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

from lightning_hiercomm.comm.base import Communicator, Handle
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.planning.cluster import Contention, CostCurve, Workload, sent_bytes
from lightning_hiercomm.planning.measure.steps import StepTimes
from lightning_hiercomm.planning.measure.stopwatch import IN_FLIGHT, ProcessorShare

SIZE = 2**20
"""Bytes of each all-reduced tensor."""

_LEAST_COUNT = 4


class Traffic:
    """All-reduces between nodes in a thread, overlapped with training; all members start and end together.

    Args:
        group: The inter-node group, which nothing else uses meanwhile. None: this rank has none.
        device: Of this rank.
    """

    def __init__(self, group: Communicator | None, device: torch.device) -> None:
        self._group = group
        self._tensors = [torch.zeros(SIZE // 4, device=device) for _ in range(IN_FLIGHT)]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hiercomm-traffic", daemon=True)
        self.count = 0
        self.seconds = 0.0

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        if self._group is None:
            return
        began = time.perf_counter()
        in_flight: deque[tuple[Tensor, Handle]] = deque()
        has_ended = False
        while not has_ended or in_flight:
            while not has_ended and len(in_flight) < IN_FLIGHT:
                tensor = self._tensors[(self.count + len(in_flight)) % IN_FLIGHT]
                tensor[0] = float(self._is_over.is_set())
                in_flight.append((tensor, self._group.all_reduce(tensor, op="max")))
            tensor, handle = in_flight.popleft()
            with Meter.overlapped():
                handle.wait()
            self.count += 1
            self.seconds = time.perf_counter() - began
            has_ended = has_ended or bool(tensor[0])  # a member has finished its steps


def measure_contention(
    group: Communicator | None,
    world: Communicator,
    train: Callable[[], StepTimes],
    device: torch.device,
    alone: CostCurve,
    workload: Workload,
    share: ProcessorShare,
) -> Contention:
    """Train while all-reduces run between the nodes; collective.

    Args:
        group: Between the nodes, see :class:`Traffic`.
        world: All ranks.
        train: Trains on this rank for a few seconds.
        device: Of this rank.
        alone: Cost of the same all-reduces without training.
        workload: A step without communication, on processors of its own.
        share: Of the processors.
    """
    world.barrier()
    with Traffic(group, device) as traffic:
        step = train()
    everyone: list[tuple[float, int, float]] = world.all_gather_object((step.seconds, traffic.count, traffic.seconds))
    steps = max(seconds for seconds, _, _ in everyone)
    reduced = [(count, seconds) for _, count, seconds in everyone if count >= _LEAST_COUNT]
    if share.processors is None or not reduced:
        return Contention()
    return derived(alone, max(seconds / count for count, seconds in reduced), steps, workload, share)


def derived(alone: CostCurve, each: float, steps: float, workload: Workload, share: ProcessorShare) -> Contention:
    """Derive the contention from the time of an all-reduce (``each``) and of a step (``steps``) while both run.

    ``share`` has busy processors.
    """
    sent = sent_bytes("all_reduce", alone.members, SIZE)
    later = max(0.0, each - alone.seconds(sent, 1))
    assert share.processors is not None
    trained = share.ranks * workload.threads * workload.seconds / steps
    billed = alone.processor_seconds(sent, 1)
    if billed >= alone.seconds(sent, 1):  # alone they used all processors: everything was billed
        return Contention(later)
    left = max(0.0, share.processors - trained) / share.ranks  # of a second, used by something else
    return Contention(later, max(0.0, left - billed / each))
