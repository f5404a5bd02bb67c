"""Elastic nodes with threads as ranks, an object as lighthouse, and nodes that die at chosen moments."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import Rank, attached
from torch.distributed import HashStore, Store

from lightning_hiercomm.comm.base import CommunicationError, Communicator, Handle
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.elastic.membership import Membership
from lightning_hiercomm.elastic.quorum import MUST_NOT_BEGIN, Quorum, Request
from lightning_hiercomm.elastic.surroundings import Surroundings
from lightning_hiercomm.elastic.topology import ElasticTopology
from lightning_hiercomm.elastic.transaction import Transaction
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes import RunningScheme, Scheme


def step_at_random(rank: Rank, node: int, local: int = 0) -> None:
    """Take one step with a random gradient that depends on the rank and the step."""
    generator = torch.Generator().manual_seed(1000 * rank.scheme.state.steps + 10 * node + local)
    rank.train(lambda values: torch.randn(values.shape, generator=generator) + 0.1 * values)


class Died(BaseException):
    """This node has died."""


class ThreadLighthouse:
    """A lighthouse: forms a quorum when the last members, or all living nodes, have asked."""

    address = "threads"

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asking: dict[str, Mapping[str, Any]] = {}
        self.alive: dict[str, str] = {}
        self._last: set[str] = set()
        self._answers: dict[str, list[Mapping[str, Any]]] = {}
        self.min_nodes = 1  # of the first quorum
        self.was_silent = False  # as every node sees it

    def ask(self, replica_id: str, data: Mapping[str, Any], timeout: float) -> Sequence[Any] | None:
        with self._changed:
            self.alive[replica_id] = data["node"]
            if replica_id not in self._answers:
                self._asking[replica_id] = data
            self._look()
            self._changed.wait_for(lambda: replica_id in self._answers, timeout)
            return self._answers.pop(replica_id, None)

    def when_back(self, is_behind: Callable[[], bool | None]) -> None:
        pass

    def leave(self) -> None:
        pass

    def lose(self, node: str) -> None:
        with self._changed:
            for replica_id in [replica_id for replica_id, name in self.alive.items() if name == node]:
                del self.alive[replica_id]
                self._asking.pop(replica_id, None)
            self._look()

    def _look(self) -> None:
        asking = set(self._asking)
        is_fast = bool(self._last) and self._last <= asking
        if len(asking) >= self.min_nodes and (is_fast or asking >= set(self.alive)):
            everyone = [self._asking[replica_id] for replica_id in sorted(asking)]
            self._answers |= dict.fromkeys(asking, everyone)
            self._last, self._asking = asking, {}
            self.min_nodes = 1
            self._changed.notify_all()


class ThreadTransport:
    """Groups and stores between threads; those of a dead node fail."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worlds: dict[tuple[str, str], ThreadWorld] = {}
        self._of_node: dict[str, list[tuple[ThreadWorld, int]]] = defaultdict(list)
        self.stores: dict[str, Store] = {}
        self.dead: set[str] = set()
        self.timeout = 5.0

    def ask(self, address: str, work: Callable[[Store], Any], timeout: float | None = None) -> Any:
        if address in self.dead:
            raise RuntimeError(f"{address} is gone")
        return work(self.stores[address])

    def ask_all(self, addresses: Sequence[str], query: Callable[[Store], Any]) -> Mapping[str, Any]:
        return {address: query(self.stores[address]) for address in addresses if address not in self.dead}

    def finish(self) -> None:
        pass

    def connect_group(self, quorum: Quorum, index: int, name: str, meter: Meter) -> Communicator:
        stores = [member.store for member in quorum.members]
        with self._lock:
            world = self._worlds.setdefault((quorum.token, name), ThreadWorld(len(stores), self.timeout))
            for position, store in enumerate(stores):
                if store in self.dead:
                    world.fail(position, RuntimeError("is gone"))
            self._of_node[stores[index]].append((world, index))
        own = world.connect(index, meter)([range(len(stores))], "inter")
        assert own is not None
        own.close = lambda: world.fail(index, RuntimeError("has closed its group"))  # type: ignore[method-assign]
        return own

    def lose(self, address: str) -> None:
        """Let the groups and the store of a node fail."""
        with self._lock:
            self.dead.add(address)
            worlds = list(self._of_node[address])
        for world, index in worlds:
            world.fail(index, RuntimeError("died"))


@dataclass
class ElasticRank:
    """One rank of a node in training.

    Attributes:
        rank: Trains.
        node: The node's name.
        local: The local rank.
        membership: Of the node.
        cluster: All nodes.
        leaves_by: Returns the exception that ends training if this rank has to leave.
    """

    rank: Rank
    node: str
    local: int
    membership: Membership
    cluster: Threads
    leaves_by: Callable[[], BaseException | None] = lambda: None

    def __post_init__(self) -> None:
        self.transaction = Transaction(self.membership, self)

    def position(self) -> str:
        return f"after {self.scheme.state.steps} steps"

    def before_change(self) -> Callable[[], None]:
        return self.scheme.before_nodes_change()

    def undo_point(self) -> Callable[[], None]:
        """Return a callback that restores all that a synchronization changes."""
        undo_state, undo_values = self.scheme.state.undo_point(), self.scheme.replica.undo_point()

        def undo() -> None:
            undo_state()
            undo_values()

        return undo

    @property
    def scheme(self) -> RunningScheme[Scheme]:
        return self.rank.scheme

    def step(self, gradient: float | None = None) -> None:
        """Take one step, by default with a random gradient."""
        if gradient is None:
            step_at_random(self.rank, int(self.node), self.local)
        else:
            self.rank.train(gradient)
        self.membership.give_state(self.state)

    def train(self, steps: int, at: Mapping[int, Callable[[], object]] | None = None) -> torch.Tensor:
        """Train until after so many steps, calling what ``at`` has for a number of steps, and finish."""
        while self.scheme.state.steps < steps:
            if at is not None and self.scheme.state.steps in at:
                at[self.scheme.state.steps]()
            self.step()
        self.scheme.finish()
        return self.rank.values

    def state(self) -> dict[str, Any] | None:
        """Return the state for a recovering node."""
        if not (self.scheme.state.is_synchronized or self.scheme.config.requirements.begins_with_copy):
            return None
        return {
            "values": [parameter.detach().clone() for parameter in self.rank.parameters],
            "optimizer": self.rank.optimizer.state_dict(),
            "schedule": {
                **self.scheme.state_dict(shared=True),
                "unsynchronized_steps": self.scheme.state.unsynchronized_steps,
            },
        }

    def join(self) -> bool:
        """Begin with the others, or recover from one of them; return whether it recovered."""
        state = self.transaction.begin(self._begin_equal, admits=True)
        topology = self.rank.topology
        assert isinstance(topology, ElasticTopology)
        topology.transaction = self.transaction
        if state is None:
            self.scheme.follow(self.rank.replica())
            return False
        with torch.no_grad():
            for parameter, values in zip(self.rank.parameters, state["values"], strict=True):
                parameter.copy_(values)
        self.rank.optimizer.load_state_dict(state["optimizer"])
        self.scheme.follow(self.rank.replica())
        self.scheme.load_state_dict(state["schedule"])
        return True

    def _begin_equal(self) -> None:
        for parameter in self.rank.parameters:
            self.rank.topology.world.broadcast(parameter.data, 0).wait()

    def die(self) -> None:
        """End this node with all its ranks."""
        if self.membership.me.store == self.cluster.address(self.node):  # or another rank was first, and it is back
            self.cluster.lose(self.node)
        raise Died


Work = Callable[[ElasticRank], Any]


@dataclass
class Threads:
    """Nodes of one run on threads.

    Args:
        scheme: Of every rank.
        elastic: The user's configuration.
        training: See `harness.attached`.
    """

    scheme: Scheme
    elastic: Elastic = field(default_factory=lambda: Elastic(dead_after=0.5))
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lights, self.wires = ThreadLighthouse(), ThreadTransport()
        self.results: dict[tuple[str, int], Any] = {}
        self.errors: dict[tuple[str, int], BaseException] = {}
        self._intra: dict[str, ThreadWorld] = {}
        self.started: list[threading.Thread] = []
        self._lives = 0
        self._address: dict[str, str] = {}

    def address(self, node: str) -> str:
        """Return the address of a node's present incarnation."""
        return self._address[node]

    def lose(self, node: str) -> None:
        self.wires.lose(self._address[node])
        self.lights.lose(node)
        self._intra[node].fail(0, Died())

    def start(self, node: int | str, work: Work, ranks: int = 1, restarts: int = 0) -> None:
        """Start a node, or a later incarnation of it."""
        name = str(node)
        self._lives += 1
        address = self._address[name] = f"{name}.{self._lives}"
        self.wires.stores[address] = HashStore()
        world = self._intra[name] = ThreadWorld(ranks, timeout=20.0)
        for local in range(ranks):
            thread = threading.Thread(target=self._run, args=(name, address, local, ranks, world, work, restarts))
            thread.daemon = True
            self.started.append(thread)
            thread.start()

    def _run(
        self, name: str, address: str, local: int, ranks: int, world: ThreadWorld, work: Work, restarts: int
    ) -> None:
        try:
            meter = Meter()
            topology = ElasticTopology(Topology([range(ranks)], local, world.connect(local, meter), meter))
            start = 1.0 + int(name)  # nodes begin unequal on purpose
            with (
                attached(topology, self.scheme, start=start, **self.training) as rank,
                self._elastic(rank, topology, name, address, local, restarts) as elastic,
            ):
                self.results[name, local] = work(elastic)
        except Died:
            world.fail(local, Died())
        except BaseException as error:
            if not isinstance(error, CommunicationError) or address not in self.wires.dead:
                self.errors[name, local] = error
                world.fail(local, error)
                self.wires.lose(address)
                self.lights.lose(name)

    @contextmanager
    def _elastic(
        self, rank: Rank, topology: ElasticTopology, name: str, address: str, local: int, restarts: int
    ) -> Iterator[ElasticRank]:
        is_first = local == 0
        begins_at = MUST_NOT_BEGIN if restarts > 0 else 0
        me = Request(name, "", "run", topology.ranks_on_node, address, begins_at)
        around = Surroundings(
            self.elastic,
            topology,
            self.lights if is_first else None,
            self.wires,
            self.wires.stores[address] if is_first else None,
        )
        membership = Membership(me, around)
        yield ElasticRank(rank, name, local, membership, self)
        membership.leave()
        if is_first:
            self.lights.lose(name)

    def play(self, work: Work, sizes: Sequence[int] = (1, 1)) -> dict[tuple[str, int], Any]:
        """Start nodes of these sizes together, and return what ``work`` returns on every rank."""
        self.lights.min_nodes = len(sizes)
        for node, ranks in enumerate(sizes):
            self.start(node, work, ranks)
        return self.end()

    def let_come(self, node: int, work: Work, ranks: int = 1, restarts: int = 0) -> None:
        """Start a node, and wait until it has asked the lighthouse."""
        self.start(node, work, ranks, restarts)
        wait_until(lambda: self.is_alive(node))

    def is_alive(self, node: int | str) -> bool:
        """Whether the lighthouse counts a node as alive."""
        return str(node) in self.lights.alive.values()

    def end(self, timeout: float = 60.0) -> dict[tuple[str, int], Any]:
        """Return the results by node and rank, or raise the first error."""
        for thread in self.started:
            thread.join(timeout)
            assert not thread.is_alive(), "a rank still runs"
        for error in self.errors.values():
            raise error
        return self.results


def play(scheme: Scheme, work: Work, sizes: Sequence[int] = (1, 1), **training: Any) -> dict[tuple[str, int], Any]:
    """Return what ``work`` returns on every rank of nodes of these sizes that do not die."""
    # on a busy machine a vote may be late by half a second, and a repeated synchronization has other bits
    return Threads(scheme, Elastic(dead_after=20.0), training).play(work, sizes)


def wait_until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    for _ in range(int(timeout / 0.005)):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("the condition does not hold")


class Failing(Handle):
    """A collective that fails at once, or after an event."""

    def __init__(self, handle: Handle, after: threading.Event | None = None) -> None:
        self._handle = handle
        self._after = after

    def wait(self) -> None:
        if self._after is not None:
            assert self._after.wait(10.0)
        raise CommunicationError("asked to fail")

    def is_done(self) -> bool:
        return True
