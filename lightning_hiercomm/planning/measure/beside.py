"""What moves and training do to each other where they share processors: measured, as neither knows it by itself.

A process is billed for the time of its threads. What the kernel does for its packets after they were sent, threads that
wake up in turn, and an interpreter that both need, are billed to nobody, or to whoever runs at that moment.
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
from lightning_hiercomm.planning.cluster import Beside, Curve, Workload, sent_bytes
from lightning_hiercomm.planning.measure.steps import StepTimes
from lightning_hiercomm.planning.measure.stopwatch import IN_FLIGHT, Share

SIZE = 2**20
"""Bytes of the tensors that are all-reduced meanwhile."""

_LEAST_MOVES = 4


class Traffic:
    """All-reduces between nodes beside whatever this rank does, as many in flight as a scheme has buckets there.

    All members begin and end together.

    Args:
        group: Between the nodes, used by nobody else meanwhile. None: this rank is in none.
        device: Of this rank.

    Attributes:
        moves: How many there were.
        seconds: That they took together.
    """

    def __init__(self, group: Communicator | None, device: torch.device) -> None:
        self._group = group
        self._tensors = [torch.zeros(SIZE // 4, device=device) for _ in range(IN_FLIGHT)]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hiercomm-traffic", daemon=True)
        self.moves = 0
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
                tensor = self._tensors[(self.moves + len(in_flight)) % IN_FLIGHT]
                tensor[0] = float(self._is_over.is_set())
                in_flight.append((tensor, self._group.all_reduce(tensor, op="max")))
            tensor, handle = in_flight.popleft()
            with Meter.beside_training():
                handle.wait()
            self.moves += 1
            self.seconds = time.perf_counter() - began
            has_ended = has_ended or bool(tensor[0])  # the first member has had enough


def measure_beside(
    group: Communicator | None,
    world: Communicator,
    train: Callable[[], StepTimes],
    device: torch.device,
    alone: Curve,
    workload: Workload,
    share: Share,
) -> Beside:
    """Train while messages go between the nodes; collective.

    Args:
        group: Between the nodes, see :class:`Traffic`.
        world: All ranks.
        train: Trains on this rank for a few seconds.
        device: Of this rank.
        alone: What the same all-reduces cost with nothing beside them.
        workload: A step with nothing beside it, on processors of its own.
        share: Of the processors.
    """
    world.barrier()
    with Traffic(group, device) as traffic:
        step = train()
    everyone: list[tuple[float, int, float]] = world.all_gather_object((step.seconds, traffic.moves, traffic.seconds))
    steps = max(seconds for seconds, _, _ in everyone)
    moving = [(moves, seconds) for _, moves, seconds in everyone if moves >= _LEAST_MOVES]
    if share.processors is None or not moving:
        return Beside()
    each = max(seconds / moves for moves, seconds in moving)
    return derived(alone, each, steps, workload, share)


def derived(alone: Curve, each: float, steps: float, workload: Workload, share: Share) -> Beside:
    """What follows from a step, and a move, that took so long beside each other.

    Args:
        alone: What such moves cost with nothing beside them.
        each: Seconds of a move of ``SIZE`` bytes beside training.
        steps: Seconds of a step beside such moves.
        workload: A step with nothing beside it, on processors of its own.
        share: Of the processors: they are busy all the time, or this would not be asked.
    """
    sent = sent_bytes("all_reduce", alone.members, SIZE)
    later = max(0.0, each - alone.seconds(sent, 1))
    assert share.processors is not None
    trained = share.ranks * workload.threads * workload.seconds / steps
    billed = alone.processor_seconds(sent, 1)
    if billed >= alone.seconds(sent, 1):  # alone they took all there was: nothing was left out of the bill
        return Beside(later)
    left = max(0.0, share.processors - trained) / share.ranks  # of a second, that something else has used
    return Beside(later, max(0.0, left - billed / each))
