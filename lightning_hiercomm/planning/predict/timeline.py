"""A discrete-event simulation of operations on resources that share processors."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_NEVER = math.inf


@dataclass(eq=False, slots=True)
class Operation:
    """An operation on a resource.

    Attributes:
        seconds: Its time with all the processors it can use.
        processors: Mean number of processors that it then uses; 0 if other hardware does the work.
        after: Operations that must end before it starts.
        delay: Seconds between the release of its resource and its end: the latency of a message.
        link: A link that it occupies, which operations on other resources may also need.
        start: When it started; all times are known after :meth:`Timeline.run`.
        free: When it released its resource.
        end: When it ended.
    """

    seconds: float
    processors: float = 0.0
    after: tuple[Operation, ...] = ()
    delay: float = 0.0
    link: str | None = None
    start: float = field(default=_NEVER, init=False)
    free: float = field(default=_NEVER, init=False)
    end: float = field(default=_NEVER, init=False)


class Timeline:
    """Operations by resource. A resource runs its operations one at a time, in the order of their addition.

    Operations on different resources overlap and share the processors fairly: one that needs no more than an equal
    share gets all it needs, and the others divide the rest.

    Args:
        processors: Number of processors. Infinite: operations delay each other only on a common link.
    """

    def __init__(self, processors: float = _NEVER) -> None:
        self.processors = processors
        self._resources: dict[str, list[Operation]] = {}
        self._added: list[tuple[str, Operation]] = []
        self._awaited: dict[str, Operation | None] = {}

    def add(
        self,
        resource: str,
        seconds: float = 0.0,
        processors: float = 0.0,
        after: Iterable[Operation] = (),
        delay: float = 0.0,
        link: str | None = None,
    ) -> Operation:
        """Add an operation to a resource; see :class:`Operation` for the arguments.

        Operations that need the same link use it in the order of their addition.
        """
        task = Operation(seconds, processors, tuple(after), delay, link)
        self._resources.setdefault(resource, []).append(task)
        self._added.append((resource, task))
        return task

    def run(self) -> None:
        """Compute the start and the end of every operation."""
        if self.processors == _NEVER:
            self._run_undisturbed()
            return
        waiting = {name: deque(tasks) for name, tasks in self._resources.items()}
        running: dict[str, Operation] = {}
        left: dict[str, float] = {}
        ends: list[float] = []  # of operations in their delay
        now = 0.0
        while True:
            self._begin(waiting, running, left, ends, now)
            while ends and ends[0] <= now:
                heapq.heappop(ends)
            if not running and not ends:
                break
            speeds = self._speeds(list(running.values()))
            moments = [left[name] / speed for name, speed in zip(running, speeds, strict=True)]
            passed = min(moments, default=math.inf)
            if ends and ends[0] - now < passed:
                passed, now = ends[0] - now, ends[0]
            else:
                now += passed
            for (name, task), speed, moment in zip(list(running.items()), speeds, moments, strict=True):
                left[name] -= passed * speed
                if moment <= passed * (1 + 1e-9):
                    self._end(task, ends, now)
                    del running[name]

    def _run_undisturbed(self) -> None:
        """Run in one pass: an operation depends on earlier ones only."""
        free = dict.fromkeys(self._resources, 0.0)
        links: defaultdict[str, _Link] = defaultdict(_Link)
        for resource, task in self._added:
            task.start = max(free[resource], *(other.end for other in task.after)) if task.after else free[resource]
            ended = links[task.link].take(task.start, task.seconds) if task.link else task.start + task.seconds
            task.free = free[resource] = ended
            task.end = task.free + task.delay

    def _begin(
        self,
        waiting: dict[str, deque[Operation]],
        running: dict[str, Operation],
        left: dict[str, float],
        ends: list[float],
        now: float,
    ) -> None:
        has_ended = True
        while has_ended:
            has_ended = False
            for name, tasks in waiting.items():
                while tasks and name not in running and self._may_begin(name, tasks[0], now):
                    task = tasks.popleft()
                    task.start = now
                    if task.seconds > 0:
                        running[name], left[name] = task, task.seconds
                    else:
                        self._end(task, ends, now)
                        has_ended = True

    def _may_begin(self, resource: str, task: Operation, now: float) -> bool:
        """Return whether a resource's next operation can start; checks first what it waited for last."""
        awaited = self._awaited.get(resource)
        if awaited is not None and awaited.end > now:
            return False
        for other in task.after:
            if other.end > now:
                self._awaited[resource] = other
                return False
        self._awaited[resource] = None
        return True

    @staticmethod
    def _end(task: Operation, ends: list[float], now: float) -> None:
        task.free, task.end = now, now + task.delay
        if task.delay:
            heapq.heappush(ends, task.end)

    def _speeds(self, tasks: Sequence[Operation]) -> list[float]:
        speeds = [1.0] * len(tasks)
        wanted = sorted((task.processors, index) for index, task in enumerate(tasks) if task.processors > 0)
        if sum(processors for processors, _ in wanted) <= self.processors:
            return speeds
        remaining = self.processors
        for position, (processors, index) in enumerate(wanted):
            granted = min(processors, remaining / (len(wanted) - position))
            speeds[index] = granted / processors
            remaining -= granted
        return speeds

    def busy(self, resource: str, start: float, end: float) -> float:
        """Return the time in which a resource was in use between two moments, after :meth:`run`."""
        return sum(_overlap(task, start, end) for task in self._resources.get(resource, []))

    def processor_seconds(self, start: float = 0.0, end: float = _NEVER) -> float:
        """Return the processor time of all operations between two moments, after :meth:`run`."""
        return sum(
            task.seconds * task.processors * _overlap(task, start, end) / (task.free - task.start)
            for tasks in self._resources.values()
            for task in tasks
            if task.free > task.start
        )


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
