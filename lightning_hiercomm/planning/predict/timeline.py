"""Who does what when: tasks on resources, and processors that all of them share."""

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
    """Something that takes time.

    Attributes:
        seconds: How long it takes with all the processors it can use.
        processors: How many it then keeps busy, on average; 0 where other hardware does the work.
        after: What must have ended before it begins.
        delay: Seconds from when its resource is free again until it has ended: a message's way.
        longer: How many times as long it takes while all processors are busy: threads that have little to do, but at
            once, then wait for their turn.
        link: What it occupies meanwhile that tasks of other resources need, too.
        start: When it began, once the timeline has run.
        free: When its resource was free again.
        end: When it ended.
    """

    seconds: float
    processors: float = 0.0
    after: tuple[Operation, ...] = ()
    delay: float = 0.0
    longer: float = 1.0
    link: str | None = None
    start: float = field(default=_NEVER, init=False)
    free: float = field(default=_NEVER, init=False)
    end: float = field(default=_NEVER, init=False)


class Timeline:
    """Resources of tasks. A resource does its tasks in the order in which they were added, one at a time.

    Tasks that run at the same time on different resources share the processors fairly. A task that needs no more than
    an equal share gets all it needs; the others divide the rest, and take longer.

    Args:
        processors: How many there are, to compute and to move bytes. Infinite: other hardware does all that, and tasks
            slow each other down only where they occupy the same link.
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
        longer: float = 1.0,
        link: str | None = None,
    ) -> Operation:
        """Put a task at the end of a resource.

        Args:
            resource: Its name; a new one is made when it is first used.
            seconds: How long the task takes with all the processors it can use. 0 only waits for ``after``.
            processors: How many it then keeps busy.
            after: What must have ended before it begins, on any resource.
            delay: Seconds from when the resource is free again until the task has ended.
            longer: How many times as long it takes while all processors are busy.
            link: What it occupies that tasks of other resources need, too: who was added first goes first.
        """
        task = Operation(seconds, processors, tuple(after), delay, longer, link)
        self._resources.setdefault(resource, []).append(task)
        self._added.append((resource, task))
        return task

    def run(self) -> None:
        """Give every task its start and its end.

        Raises:
            ValueError: If tasks wait for each other in a circle.
        """
        if self.processors == _NEVER:
            self._run_undisturbed()
            return
        waiting = {name: deque(tasks) for name, tasks in self._resources.items()}
        running: dict[str, Operation] = {}
        left: dict[str, float] = {}
        ends: list[float] = []  # of tasks that have left their resource
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
        if stuck := [name for name, tasks in waiting.items() if tasks]:
            raise ValueError(f"the tasks of {', '.join(stuck)} wait for each other")

    def _run_undisturbed(self) -> None:
        """In one pass: only what was added before it slows a task down, or is waited for."""
        free = dict.fromkeys(self._resources, 0.0)
        links: defaultdict[str, _Link] = defaultdict(_Link)
        for place, (resource, task) in enumerate(self._added):
            task.start = max(free[resource], *(other.end for other in task.after)) if task.after else free[resource]
            if task.start == _NEVER:
                before = {id(other) for _, other in self._added[:place]}
                if not before.issuperset(map(id, task.after)):
                    stuck = dict.fromkeys(name for name, left in self._added if id(left) not in before)
                    raise ValueError(f"the tasks of {', '.join(stuck)} wait for each other")
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
        """Let begin what can; a task of no length may let others begin at the same moment."""
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
        """Whether all that a resource's next task waits for has ended; what it waited for last is looked at first."""
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
        """How fast each task goes, from 0 to 1, when these run at the same time."""
        speeds = [1.0] * len(tasks)
        if self.processors == _NEVER:
            return speeds
        wanted = sorted((task.processors, index) for index, task in enumerate(tasks) if task.processors > 0)
        if sum(processors for processors, _ in wanted) <= self.processors:
            return speeds
        remaining = self.processors
        for position, (processors, index) in enumerate(wanted):
            longer = tasks[index].longer if len(wanted) > 1 else 1.0
            granted = min(processors / longer, remaining / (len(wanted) - position))
            speeds[index] = granted / processors
            remaining -= granted
        return speeds

    def busy(self, resource: str, start: float, end: float) -> float:
        """How long a resource had something to do between two moments; call :meth:`run` first."""
        return sum(_overlap(task, start, end) for task in self._resources.get(resource, []))

    def processor_seconds(self, start: float = 0.0, end: float = _NEVER) -> float:
        """What all tasks took of the processors between two moments; call :meth:`run` first."""
        return sum(
            task.seconds * task.processors * _overlap(task, start, end) / (task.free - task.start)
            for tasks in self._resources.values()
            for task in tasks
            if task.free > task.start
        )


class _Link:
    """When a link is taken."""

    def __init__(self) -> None:
        self._begins: list[float] = []  # of the times in which it is, in their order
        self._ends: list[float] = []

    def take(self, start: float, seconds: float) -> float:
        """Take it for so long, from a moment on, wherever it is still free; returns when that has ended."""
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
