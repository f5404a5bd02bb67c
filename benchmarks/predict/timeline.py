"""A simulation of operations on resources."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

_NEVER = math.inf


@dataclass(eq=False, slots=True)
class Operation:
    """An operation on a resource.

    Attributes:
        seconds: Its time.
        after: Operations that must end before it starts.
        delay: Seconds between the release of its resource and its end: the latency of a message.
        link: A link that it occupies, which operations on other resources may also need.
        start: When it started; all times are known after :meth:`Timeline.run`.
        free: When it released its resource.
        end: When it ended.
    """

    seconds: float
    after: tuple[Operation, ...] = ()
    delay: float = 0.0
    link: str | None = None
    start: float = field(default=_NEVER, init=False)
    free: float = field(default=_NEVER, init=False)
    end: float = field(default=_NEVER, init=False)


class Timeline:
    """Operations by resource. A resource runs its operations one at a time, in the order of their addition.

    Operations on different resources overlap, and delay each other only on a common link.
    """

    def __init__(self) -> None:
        self._resources: dict[str, list[Operation]] = {}
        self._added: list[tuple[str, Operation]] = []

    def add(
        self,
        resource: str,
        seconds: float = 0.0,
        after: Iterable[Operation] = (),
        delay: float = 0.0,
        link: str | None = None,
    ) -> Operation:
        """Add an operation to a resource; see :class:`Operation` for the arguments.

        Operations that need the same link use it in the order of their addition.
        """
        task = Operation(seconds, tuple(after), delay, link)
        self._resources.setdefault(resource, []).append(task)
        self._added.append((resource, task))
        return task

    def run(self) -> None:
        """Compute the start and the end of every operation, in one pass: each depends on earlier ones only."""
        free = dict.fromkeys(self._resources, 0.0)
        links: defaultdict[str, _Link] = defaultdict(_Link)
        for resource, task in self._added:
            task.start = max(free[resource], *(other.end for other in task.after)) if task.after else free[resource]
            ended = links[task.link].take(task.start, task.seconds) if task.link else task.start + task.seconds
            task.free = free[resource] = ended
            task.end = task.free + task.delay

    def busy(self, resource: str, start: float, end: float) -> float:
        """Return the time in which a resource was in use between two moments, after :meth:`run`."""
        return sum(_overlap(task, start, end) for task in self._resources.get(resource, []))


class _Link:
    def __init__(self) -> None:
        self._begins: list[float] = []  # ascending
        self._ends: list[float] = []

    def take(self, start: float, seconds: float) -> float:
        """Use the link for some seconds from a moment on, in its free times; return the end."""
        if not seconds:
            return start
        first = last = bisect_right(self._ends, start)
        begin, end = start, start + seconds
        while last < len(self._begins) and self._begins[last] < end:
            begin = min(begin, self._begins[last])
            end += self._ends[last] - max(start, self._begins[last])
            last += 1
        self._begins[first:last], self._ends[first:last] = [begin], [end]
        return end


def _overlap(task: Operation, start: float, end: float) -> float:
    return max(0.0, min(task.free, end) - max(task.start, start))
