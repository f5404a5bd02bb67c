"""Gossip: every step, replicas mix with a few others instead of all: Crossover-SGD, SGP, DP-SGD."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.base import Handle, finished
from lightning_hiercomm.comm.lane import Lane
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.replica import Bucket, Replica
from lightning_hiercomm.schemes.base import Scheme
from lightning_hiercomm.schemes.graphs import (
    DirectedExponential,
    Fairness,
    Full,
    Graph,
    RandomPermutation,
    Ring,
    Round,
    round_of,
)
from lightning_hiercomm.topology import Topology

T = TypeVar("T")

GraphName = Literal["random_permutation", "directed_exponential", "ring", "full"]

_STEPS_COMPARED = 4
_SAMPLES_PER_SEGMENT = 4096


class Gossip(Scheme):
    """Mix parameters with a few other nodes at every step, each segment of the model with others.

    At step t, with z the parameters that the forward pass sees, on every node (a rank, if not ``hierarchical``)::

        g   := gradient at z, averaged over the node if hierarchical
        x   := optimizer(x, g)
        for every segment s of the model, all at once:
            with d the out-degree of this node in the graph of (t, s), p = 1 / (d + 1):
            send p x_s, p w_s to d nodes;  x_s, w_s := p x_s, p w_s + what arrives
        z_s := x_s / w_s

    The sum of x and that of w over the nodes are conserved (push-sum), so z tends to the mean of all nodes. Where all
    nodes send and receive equally much (the mixing is doubly stochastic), w stays 1 and z is x: then
    ``x_s := (x_s + received_s) / 2`` for one peer, Crossover-SGD's Algorithm 1. The weights w follow from the graph,
    which every rank knows, so they are computed and not sent.

    A node sends the model once per step and peer, to as many nodes as the graph says, whatever the number of nodes; no
    barrier joins all of them. With hierarchical gossip local rank ``s mod L`` carries segment s, so all links of a node
    work, and shares what arrived with its node.

    - Crossover-SGD: ``Gossip(hierarchical=False)``; hierarchical Crossover-SGD: ``Gossip()``.
    - SGP: ``Gossip("directed_exponential", segments=1, hierarchical=False)``.
    - DP-SGD: ``Gossip("ring", segments=1, hierarchical=False, overlap=True)``.

    Rank weights (of unequal nodes, of heterogeneous batches): node m adds M W_m times its optimizer's update to x. (As
    initial push-sum weights they would wear off: mixing evens w out, and then all nodes' gradients count the same.)

    Narrower types on the wire: the share that travels is rounded, and the sender subtracts from its own value what it
    really sent. So the sum is conserved and no update is lost, but nodes come only as close as the type resolves (0.4 %
    of a value in bfloat16). ``Wire.raw`` makes no difference here.

    Float buffers (BatchNorm statistics) do not travel; they are averaged when the nodes agree for a validation or a
    checkpoint.

    Sources: Yeo et al., "Crossover-SGD: A gossip-based communication in distributed deep learning for alleviating large
    mini-batch problem and enhancing scalability", Algorithms 1 and 2, section 3.3; Assran et al. 2019, "Stochastic
    Gradient Push for Distributed Deep Learning", Algorithm 1; Lian et al. 2017 (DP-SGD), Algorithm 1.

    Args:
        graph: Who sends to whom: a name, or any :class:`~lightning_hiercomm.schemes.graphs.Graph`.
        segments: The number of equal parts into which the model is cut (never more than elements; one more per further
            dtype), or a list of module names such as ``["net.layer1", "net.layer2"]``: the parameters below each are
            one segment, all others the last one.
        hierarchical: Average gradients inside a node and gossip between nodes. Otherwise every rank gossips on its own,
            and gradients are not exchanged at all.
        fair: How ``"random_permutation"`` draws; see :class:`~lightning_hiercomm.schemes.graphs.RandomPermutation`.
        seed: Of ``"random_permutation"``.
        overlap: Let the exchange travel during the next forward and backward pass. What arrives is added before the
            next optimizer step, whose gradients are then taken at the parameters before mixing: ``x := mix(x) - lr
            g(x)``, DP-SGD's order. Nothing is lost or counted twice: until then every node still holds all of its x.
        segment_bytes: Cut the model into segments of at most so many bytes, in place of ``segments``.

    Raises:
        ValueError: For a bad argument; at :meth:`bind`, for a graph that is invalid or differs between ranks, and for
            module names that no parameter has.
    """

    _segments: list[Bucket]
    _weights: list[list[float]]
    _exchanges: list[_Exchange]
    _met: list[tuple[Tensor, Tensor]]

    def __init__(
        self,
        graph: Graph | GraphName = "random_permutation",
        segments: int | list[str] = 8,
        hierarchical: bool = True,
        fair: Fairness = "uniform",
        seed: int = 0,
        overlap: bool = False,
        segment_bytes: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(segments, int) and segments < 1:
            raise ValueError(f"segments={segments} must be a positive number, or a list of module names")
        if isinstance(segments, str) or (not isinstance(segments, int) and not segments):
            raise ValueError(f"segments={segments!r} must be a positive number, or a list of module names")
        if segment_bytes is not None and segment_bytes < 1:
            raise ValueError(f"segment_bytes={segment_bytes} must be a positive number of bytes, or None")
        self.graph = _graph(graph, fair, seed)
        self.segments = segments
        self.segment_bytes = segment_bytes
        self.hierarchical = hierarchical
        self.overlap = overlap
        self.gradients = "intra" if hierarchical else "none"
        self._given_topology: Topology | None = None
        self._segments = []
        self._reset()

    # ---- life of a run -------------------------------------------------------------------------------------------

    def bind(
        self, replica: Replica, topology: Topology, optimizer: Optimizer | None = None, wire: Wire | None = None
    ) -> None:
        if self._given_topology is not topology:
            self._given_topology = topology
            self.topology = topology if self.hierarchical else topology.flat()
            if self.topology.num_nodes > 1:
                self._beside = self.topology.twin()
                self._lane = Lane(replica.device, topology.meter)
                self.lanes = [self._lane]
        # Agreements use the parameters' own type: they are rare, and gossip itself never needs them.
        super().bind(replica, self.topology, optimizer, wire=None)
        self.wire = wire or Wire()
        self._segments = self._cut(replica)
        self._reset()
        if self.topology.num_nodes > 1:
            self._compare_with_other_ranks()

    def step(self, run: Callable[[], T], last: bool = False) -> T:
        if self.topology.num_nodes == 1:
            return super().step(run, last)
        if not self._exchanges and self._is_plain:
            result = run()
        else:
            result = self.run_with_update(run, self._update)
            self._merge()  # has been done, unless a gradient scaler skipped the optimizer's step
        self.count_step()
        self._launch()
        if not self.overlap:
            self._merge()
        return result

    def settle(self) -> None:
        for exchange in self._exchanges:
            exchange.handle.wait()

    def agree(self) -> None:
        """Write the mean ``sum x / sum w`` over all nodes to the replica, exactly.

        An exchange in flight (``overlap``) moves mass between nodes and leaves the sum as it is, so the mean is that of
        the nodes' present values; what arrived is merged when training goes on.
        """
        self.settle()
        if self.unagreed_steps:
            # `Average` weighs node m with W_m.
            self._scale([weight / self._pull for weight in self._own_weights])
            self._average(self.steps, exact=True)

    def finish(self) -> None:
        super().finish()
        self._reset()

    # ---- the algorithm -------------------------------------------------------------------------------------------

    def _update(self, optimizer_step: Callable[[], object]) -> None:
        """The optimizer steps x with gradients taken at z, after what arrived meanwhile was mixed in."""
        self._merge()
        weights, pull = self._own_weights, self._pull
        self._scale(weights)
        before = [parameter.detach().clone() for parameter in self.replica.parameters] if pull != 1.0 else []
        optimizer_step()
        with torch.no_grad():
            for parameter, value in zip(self.replica.parameters, before, strict=False):
                parameter.lerp_(value, 1.0 - pull)
        self._scale([1.0 / weight for weight in weights])

    @torch.no_grad()
    def _launch(self) -> None:
        """Send a share of every segment that this rank carries, and make room for what comes.

        One by one, so that the first is on the link while the next is packed, and shared with the node while the last
        are still on their way.
        """
        topology, node = self.topology, self.topology.node
        for index, bucket in enumerate(self._segments):
            weights = self._weights[index]
            round_ = round_of(self.graph, topology.num_nodes, self.steps - 1, index)
            exchange = _Exchange(round_.push(weights))
            carried = None
            if index % topology.lanes == topology.local_rank:
                assert topology.inter is not None
                share = bucket.pack().mul_(weights[node] * round_.share(node))
                if self.wire.compresses(share.dtype):
                    share = share.to(self.wire.dtype)
                received = [torch.empty_like(share) for _ in round_.receive_from[node]]
                handle = topology.inter.exchange(
                    [(share, peer) for peer in round_.send_to[node]],
                    list(zip(received, round_.receive_from[node], strict=True)),
                )
                carried = _Carried(round_, weights, share, received, handle)
                for tensor in (share, *received):
                    self._lane.uses(tensor)
            exchange.handle = self._lane.submit(partial(self._collect, index, carried, exchange))
            self._exchanges.append(exchange)

    @torch.no_grad()
    def _collect(self, index: int, carried: _Carried | None, exchange: _Exchange) -> None:
        """On the lane: take a segment as it arrives, and share it with the node."""
        if carried is None:
            exchange.change = self._segments[index].empty()
        else:
            carried.handle.wait()
            exchange.met = self._sample(carried)
            exchange.change = self._change(self._segments[index], carried)
        self._beside.intra.broadcast(exchange.change, source=index % self.topology.lanes).wait()

    def _change(self, bucket: Bucket, carried: _Carried) -> Tensor:
        """What arrived less what was sent. Taken pairwise, so that equal replicas change by exactly nothing."""
        own = carried.share.to(bucket.dtype)
        change, *others = (received.to(bucket.dtype).sub_(own) for received in carried.received)
        for other in others:
            change.add_(other)
        more_came = len(carried.received) - len(carried.round.send_to[self.topology.node])
        return change.add_(own, alpha=more_came) if more_came else change

    @torch.no_grad()
    def _merge(self) -> None:
        """Add what was launched last, segment by segment as it arrives."""
        node, exchanges = self.topology.node, self._exchanges
        if exchanges:
            self._exchanges, self._met = [], []
        for index, exchange in enumerate(exchanges):
            exchange.handle.wait()
            assert exchange.change is not None
            self._lane.hands_out(exchange.change)
            bucket, before, after = self._segments[index], self._weights[index][node], exchange.weights[node]
            if before == after == 1.0:
                bucket.add(exchange.change)
            else:
                bucket.unpack(bucket.pack().mul_(before).add_(exchange.change).div_(after))
            self._weights[index] = exchange.weights
            if exchange.met is not None:
                self._met.append(exchange.met)
            exchange.change = None  # its memory is free for the next

    # ---- state and what a person may watch -----------------------------------------------------------------------

    @property
    def phase(self) -> str:
        return "gossip"

    def scalars(self) -> dict[str, float]:
        """``disagreement``: the distance of a node from the mean, relative to the parameters' norm, before mixing.

        It is estimated, with no further communication, from what this rank's peers sent at the last exchange, on up to
        4096 elements of every segment that it carries. Over uniformly random peers ``E ||z_r - z_peer||^2`` is ``2 n /
        (n - 1)`` times the mean squared distance from the mean; a ring's neighbours are closer than that.
        """
        if not self._met:
            return {}
        distance = sum(float((own - other).square().sum()) for own, other in self._met)
        norm = sum(float(own.square().sum()) for own, _ in self._met)
        size = self.topology.num_nodes
        return {"disagreement": (distance * (size - 1) / (2 * size) / norm) ** 0.5 if norm else 0.0}

    def state_dict(self) -> dict[str, Any]:
        """All state. What is still in flight is not in it: call :meth:`settle` first."""
        state = super().state_dict() | {"weights": torch.tensor(self._weights, dtype=torch.float64)}
        if self._exchanges:
            changes = [exchange.change for exchange in self._exchanges if exchange.change is not None]
            state["arrived"] = [change.clone() for change in changes]
            weights = [exchange.weights for exchange in self._exchanges]
            state["arrived_weights"] = torch.tensor(weights, dtype=torch.float64)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._reset()
        if "weights" not in state:
            return
        expected, saved = (len(self._segments), self.topology.num_nodes), tuple(state["weights"].shape)
        if expected != saved:
            raise ValueError(
                f"the checkpoint's gossip has {saved[0]} segments on {saved[1]} nodes, this run {expected[0]} on"
                f" {expected[1]}. Resume with the same, or from the agreed parameters only."
            )
        self._weights = state["weights"].tolist()
        if "arrived" in state:
            arrived = zip(self._segments, state["arrived"], state["arrived_weights"].tolist(), strict=True)
            self._exchanges = [
                _Exchange(weights, change=change.to(bucket.device, copy=True)) for bucket, change, weights in arrived
            ]

    def _reset(self) -> None:
        """The replicas are equal: nothing is in flight and every node has the same weight."""
        self._weights = [[1.0] * self.topology.num_nodes for _ in self._segments]
        self._exchanges = []
        self._met = []

    # ---- details -------------------------------------------------------------------------------------------------

    @property
    def _own_weights(self) -> list[float]:
        """This node's push-sum weight, by segment."""
        return [weights[self.topology.node] for weights in self._weights]

    @property
    def _pull(self) -> float:
        """How much this node's updates count, 1 on average over the nodes."""
        assert self._given_topology is not None
        if self.topology.weights != self._given_topology.weights:
            self.topology.set_weights(self._given_topology.weights)
        pull = self.topology.node_weight * self.topology.num_nodes
        return 1.0 if abs(pull - 1.0) < 1e-9 else pull

    @property
    def _is_plain(self) -> bool:
        """Whether x is z and updates count as they are, so that the user's step needs no help."""
        return self._pull == 1.0 and all(weight == 1.0 for weight in self._own_weights)

    @torch.no_grad()
    def _scale(self, factors: Sequence[float]) -> None:
        for bucket, factor in zip(self._segments, factors, strict=True):
            if factor != 1.0:
                bucket.unpack(bucket.pack().mul_(factor))

    def _sample(self, carried: _Carried) -> tuple[Tensor, Tensor]:
        """A few elements of this node's and of a peer's parameters."""
        node = self.topology.node
        every = -(-carried.share.numel() // _SAMPLES_PER_SEGMENT)
        own, other = (
            share[::every].float() / (carried.round.share(m) * carried.weights[m])
            for m, share in ((node, carried.share), (carried.round.receive_from[node][0], carried.received[0]))
        )
        return own, other

    def _cut(self, replica: Replica) -> list[Bucket]:
        """The parameters as segments: flat, in an order that is the same on every rank."""
        parameters = replica.parameters
        if self.segment_bytes is not None:
            return Replica(parameters, bucket_bytes=self.segment_bytes).buckets
        if isinstance(self.segments, int):
            largest = max((parameter.element_size() for parameter in parameters), default=1)
            elements = sum(parameter.numel() * parameter.element_size() for parameter in parameters) / largest
            return Replica(parameters, bucket_bytes=-int(-elements // self.segments) * largest).buckets
        return self._cut_by_module(replica, self.segments)

    @staticmethod
    def _cut_by_module(replica: Replica, modules: Sequence[str]) -> list[Bucket]:
        def is_below(name: str, module: str) -> bool:
            return name == module or name.startswith(module + ".")

        for module in modules:
            if not any(is_below(name, module) for name in replica.names.values()):
                names = ", ".join(list(replica.names.values())[:20]) or "not named"
                raise ValueError(
                    f"segments={list(modules)!r}: no parameter lies below {module!r}. The parameters are {names}"
                )
        groups: list[list[Tensor]] = [[] for _ in range(len(modules) + 1)]
        for parameter in replica.parameters:
            name = replica.names.get(id(parameter), "")
            index = next((i for i, module in enumerate(modules) if is_below(name, module)), len(modules))
            groups[index].append(parameter)
        return [bucket for group in groups for bucket in Replica(group, bucket_bytes=2**62).buckets]

    def _compare_with_other_ranks(self) -> None:
        """Refuse a graph that tells different ranks different things: somebody would wait for ever."""
        if self.topology.inter is None:
            return
        size = self.topology.num_nodes
        rounds = [
            round_of(self.graph, size, step, index).send_to
            for step in range(_STEPS_COMPARED)
            for index in range(len(self._segments))
        ]
        seen = repr(([bucket.numel for bucket in self._segments], rounds)).encode()
        digests = self.topology.inter.all_gather_object(hashlib.blake2b(seen, digest_size=16).hexdigest())
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise ValueError(
                    f"{self.graph!r} tells rank {rank} to exchange other segments, or with others, than rank 0, so one"
                    " would wait for what the other never sends. Give every rank the same arguments and seed, and"
                    " let send_to depend on its arguments only."
                )


@dataclass(frozen=True)
class _Carried:
    """One segment on its way between nodes: what this rank sent to each of its peers, and what it gets."""

    round: Round
    weights: list[float]
    share: Tensor
    received: list[Tensor]
    handle: Handle


@dataclass
class _Exchange:
    """One segment's exchange: all nodes' weights after it, what it adds and, if this rank carried it, what was met."""

    weights: list[float]
    handle: Handle = finished
    change: Tensor | None = None
    met: tuple[Tensor, Tensor] | None = None


def _graph(graph: Graph | str, fair: Fairness, seed: int) -> Graph:
    if graph == "random_permutation":
        return RandomPermutation(fair, seed)
    if fair != "uniform":
        raise ValueError(
            f"fair={fair!r} belongs to graph='random_permutation', not to graph={graph!r}."
            " Leave it out, or give it to the graph itself: graph=RandomPermutation(fair=...)."
        )
    if isinstance(graph, Graph):
        return graph
    named: dict[str, Callable[[], Graph]] = {
        "directed_exponential": DirectedExponential,
        "ring": Ring,
        "full": Full,
    }
    if not isinstance(graph, str) or graph not in named:
        names = ", ".join(map(repr, ("random_permutation", *named)))
        raise ValueError(f"graph={graph!r} must be one of {names}, or a Graph")
    return named[graph]()
