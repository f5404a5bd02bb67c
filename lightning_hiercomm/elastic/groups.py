"""Inter-node communicators whose members change from one synchronization to the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_hiercomm.comm.base import CommunicationError, Communicator, Handle, Reduction, finished
from lightning_hiercomm.comm.meter import Meter


class InterNodeGroup(Communicator):
    """The ranks with one local index on all nodes of the quorum; usable only inside of a synchronization.

    An error is not raised where it happens, because the other ranks of the node would wait for this one. The vote after
    the exchange reports it.

    Attributes:
        is_open: Whether a synchronization runs.
        error: The first communication error; later collectives do nothing until the group is connected again.
    """

    def __init__(self, meter: Meter) -> None:
        super().__init__([0], 0, "inter", meter)
        self.is_open = False
        self.error: str | None = None
        self._group: Communicator | None = None
        self._pending: weakref.WeakSet[_Guarded] = weakref.WeakSet()

    def connect(self, group: Communicator | None) -> None:
        """Replace the members; None if there is no other node."""
        self.disconnect()
        self._group, self.error = group, None
        self.rank, self.size = (0, 1) if group is None else (group.rank, group.size)
        self.ranks = tuple(range(self.size))

    def disconnect(self) -> None:
        """Close the connections, and drop all pending collectives."""
        group, self._group = self._group, None
        for handle in list(self._pending):
            handle.forget()
        if group is not None:
            group.close()

    def fail(self, error: str) -> None:
        """Record an error, and close the connections, so that waiting peers fail as well."""
        if self.error is None:
            self.error = error.splitlines()[0] if error else "unknown"
            self.disconnect()

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = []

        def gather(group: Communicator) -> Handle:
            values.extend(group.all_gather_object(value))
            return finished

        self._launch(gather)
        return values if len(values) == self.size else [value] * self.size

    def _all_reduce(self, tensor: Tensor, op: Reduction, waiting: bool) -> Handle:
        return self._launch(lambda group: group.all_reduce(tensor, op, waiting))

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._launch(lambda group: group.reduce_scatter(output, tensor))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._launch(lambda group: group.all_gather(output, tensor))

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        return self._launch(lambda group: group.broadcast(tensor, source))

    def _exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        return self._launch(lambda group: group.exchange(send, receive))

    def _count(self, sent_bytes: float, level: str | None = None) -> None:
        pass  # the connected group counts

    def _launch(self, start: Callable[[Communicator], Handle]) -> Handle:
        if not self.is_open:
            raise RuntimeError("elastic nodes communicate only inside a synchronization")
        group = self._group
        if group is None and self.size > 1:
            self.fail("not connected")
        if self.error is not None or group is None:
            return finished
        try:
            handle = _Guarded(start(group), self)
        except CommunicationError as error:
            self.fail(str(error))
            return finished
        self._pending.add(handle)
        return handle


class _Guarded(Handle):
    """A pending collective whose error its group records."""

    def __init__(self, handle: Handle, group: InterNodeGroup) -> None:
        self._handle: Handle | None = handle
        self._group = group

    def forget(self) -> None:
        self._handle = None  # a pending collective keeps its connections open

    def wait(self) -> None:
        handle = self._handle
        if handle is None:
            return
        error = ""
        try:
            handle.wait()
        except CommunicationError as raised:
            error = str(raised)  # not the error itself, whose traceback refers to the handle
        self._handle = handle = None
        if error:
            self._group.fail(error)

    def is_done(self) -> bool:
        return self._handle is None or self._handle.is_done()


class NodesWorld(Communicator):
    """All ranks of all nodes of the quorum; outside of a synchronization, the ranks of this node.

    It sends small messages, blocking, through the first rank of each node.
    """

    def __init__(self, intra: Communicator, inter: InterNodeGroup | None) -> None:
        super().__init__(range(intra.size), intra.rank, "world", Meter())
        self._intra = intra
        self._inter = inter
        self._nodes: Sequence[Sequence[int]] = [range(intra.size)]
        self._node = 0

    def reform(self, nodes: Sequence[Sequence[int]], node: int) -> None:
        """Contain these nodes, each given by its ranks; ``node`` is the index of this one."""
        self._nodes, self._node = nodes, node
        self.ranks = tuple(range(sum(map(len, nodes))))
        self.rank, self.size = nodes[node][self._intra.rank], len(self.ranks)

    def all_gather_object(self, value: Any) -> list[Any]:
        own = self._intra.all_gather_object(value)
        if self._inter is not None and len(self._nodes) > 1:
            own = [each for of_node in self._inter.all_gather_object(own) for each in of_node]
        gathered: list[Any] = self._intra.all_gather_object(own)[0]
        return gathered if len(gathered) == self.size else [value] * self.size  # shorter if the exchange has failed

    def _all_reduce(self, tensor: Tensor, op: Reduction, waiting: bool) -> Handle:
        self._intra.all_reduce(tensor, op).wait()
        return self._between_first_ranks(tensor, lambda inter: inter.all_reduce(tensor, op))

    def _broadcast(self, tensor: Tensor, source: int) -> Handle:
        node = next(index for index, ranks in enumerate(self._nodes) if source in ranks)
        if node == self._node:
            self._intra.broadcast(tensor, list(self._nodes[node]).index(source)).wait()
        return self._between_first_ranks(tensor, lambda inter: inter.broadcast(tensor, node))

    def _between_first_ranks(self, tensor: Tensor, start: Callable[[InterNodeGroup], Handle]) -> Handle:
        if len(self._nodes) > 1:
            if self._inter is not None:
                start(self._inter).wait()
            self._intra.broadcast(tensor, 0).wait()
        return finished

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        raise NotImplementedError("the world of elastic nodes only reduces, broadcasts and gathers objects")

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        return self._reduce_scatter(output, tensor)

    def _exchange(self, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]]) -> Handle:
        return self._reduce_scatter(receive[0][0], send[0][0])
