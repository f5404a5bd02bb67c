"""Gossip: average parameters with a few peers at every step (Crossover-SGD, SGP, DP-SGD)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.schemes.base import RunningScheme, Scheme
from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.in_place_of_step import Update
from lightning_hiercomm.schemes.reducers.graphs import (
    DirectedExponential,
    Full,
    Graph,
    RandomPermutation,
    Ring,
    partners_of,
)
from lightning_hiercomm.schemes.reducers.neighbors import Peers
from lightning_hiercomm.schemes.reducers.pending import Pending
from lightning_hiercomm.schemes.scheme_state import LOCAL, SchemeState

GraphName = Literal["random_permutation", "directed_exponential", "ring", "full"]

_GRAPHS: dict[str, Callable[[], Graph]] = {
    "random_permutation": RandomPermutation,
    "directed_exponential": DirectedExponential,
    "ring": Ring,
    "full": Full,
}

_STEPS_COMPARED = 4


class Gossip(Scheme):
    """Average parameters with a few other nodes at every step, each fragment of the model with different peers.

    At step t every node does the following, with z the parameters of the forward pass::

        g := gradient at z, averaged over the node
        x := optimizer(x, g)
        for every fragment s, with d the out-degree of this node in the graph of (t, s), and p = 1 / (d + 1):
            send p x_s, p w_s to d nodes
            x_s, w_s := p x_s, p w_s + received
            z_s := x_s / w_s

    The sums of x and of w over the nodes are conserved (push-sum), so z tends to the mean of all nodes. If all nodes
    send as much as they receive (the mixing is doubly stochastic), w stays 1 and z is x: for one peer
    ``x_s := (x_s + received_s) / 2``, Crossover-SGD's Algorithm 1. Every rank computes w from the graph.

    A node sends the model once per step to each peer, without a barrier. Of the L ranks of a node, local rank
    ``s mod L`` exchanges fragment s and broadcasts the result inside its node, so all links of a node are used.

    - Crossover-SGD: ``Gossip()`` with ``ranks_per_node=1``; hierarchical Crossover-SGD: ``Gossip()``.
    - SGP: ``Gossip("directed_exponential", fragments=1)`` with ``ranks_per_node=1``.
    - DP-SGD: ``Gossip("ring", fragments=1, overlap=True)`` with ``ranks_per_node=1``.

    With rank weights (unequal nodes, heterogeneous batches), node m adds M W_m times its optimizer's update to x.
    (Initial push-sum weights would not do, because mixing equalizes w.)

    With a narrower ``wire_dtype``, the sender subtracts the rounded values from its own. So the sum is conserved and no
    update is lost, but nodes converge only to the resolution of the type (0.4 % of a value in bfloat16). ``Wire.raw``
    has no effect.

    Float buffers (BatchNorm statistics) are averaged only for a validation or a checkpoint.

    Sources: Yeo et al., "Crossover-SGD: A gossip-based communication in distributed deep learning for alleviating large
    mini-batch problem and enhancing scalability", Algorithms 1 and 2, section 3.3; Assran et al. 2019, "Stochastic
    Gradient Push for Distributed Deep Learning", Algorithm 1; Lian et al. 2017 (DP-SGD), Algorithm 1.

    Args:
        graph: The communication graph, which selects the peers of every step: a name, or any ``Graph``.
        fragments: The number of equal fragments of the model (at most its elements; one more for each further dtype),
            or a list of module names such as ``["net.layer1", "net.layer2"]``: the parameters of each module form one
            fragment, all others the last one. Crossover-SGD calls them segments.
        overlap: Overlap the exchange with the next forward and backward pass. Received values are added before the next
            optimizer step, whose gradients belong to the parameters before mixing: ``x := mix(x) - lr g(x)``, DP-SGD's
            order. Until then every node keeps all of its x.
        push_sum: Use the weights w, as above. False: every node sends all of x and continues with the plain mean of its
            own and the received values, ``(own + received) / 2`` for one peer. With ``sampling="independent"`` in the
            graph that is Crossover-SGD's unfair baseline, whose mean over the nodes drifts; otherwise the result is the
            same.

    Raises:
        ValueError: If an argument is invalid; when a run begins, if the graph is invalid or differs between ranks, or
            no parameter belongs to a module name.
    """

    def __init__(
        self,
        graph: Graph | GraphName = "random_permutation",
        fragments: int | list[str] = 8,
        overlap: bool = False,
        push_sum: bool = True,
    ) -> None:
        if isinstance(fragments, str) or (isinstance(fragments, int) and fragments < 1) or not fragments:
            raise ValueError(f"fragments={fragments!r} must be a positive number, or a list of module names")
        if not isinstance(graph, Graph):
            if graph not in _GRAPHS:
                raise ValueError(f"graph={graph!r} must be one of {', '.join(map(repr, _GRAPHS))}, or a Graph")
            graph = _GRAPHS[graph]()
        self.graph = graph
        self.fragments = fragments
        self.overlap = overlap
        self.push_sum = push_sum

    def build(self, context: Context) -> RunningGossip:
        return RunningGossip(self, context)


@dataclass
class GossipState(SchemeState):
    """The state of gossip.

    Attributes:
        weights: The nodes' push-sum weights, by fragment.
        pending: The exchange that has started and is not merged yet.
    """

    weights: list[list[float]] = field(default_factory=list, metadata=LOCAL)
    pending: Pending = field(default_factory=Pending, metadata=LOCAL)

    def settle(self) -> None:
        self.pending.settle()


class RunningGossip(RunningScheme[Gossip]):
    """Run gossip: exchange and merge fragments at every step."""

    state: GossipState
    state_type = GossipState
    phase = "gossip"

    def __init__(self, config: Gossip, context: Context) -> None:
        super().__init__(config, context)
        # training that waits for every exchange uses no communicator concurrently
        self._duplicate = self.topology.duplicate() if config.overlap and not self.is_alone else self.topology
        self._background = self._new_background()
        self._cut()

    # ---- the algorithm: a step of x at z, and an exchange of its fragments ---------------------------------------

    def before_step(self, last: bool) -> Update | None:
        has_plain_weights = all(weight == 1.0 for weight in self.own_weights)
        if self.is_alone or not (self.state.pending or self._share_of_updates != 1.0 or not has_plain_weights):
            return None
        return self._merge_and_step

    def _merge_and_step(self, optimizer_step: Callable[..., object] | None) -> None:
        """Merge the pending exchange, then step x with the gradients computed at z."""
        self._merge()
        if optimizer_step is None:
            return
        weights, share = self.own_weights, self._share_of_updates
        z = {index: self._fragments[index].pack() for index, weight in enumerate(weights) if weight != 1.0}
        self._scale(weights)
        before = [parameter.detach().clone() for parameter in self.replica.parameters] if share != 1.0 else []
        optimizer_step(partial(self._offset_from_z, z, weights))
        with torch.no_grad():
            for parameter, value in zip(self.replica.parameters, before, strict=False):
                parameter.lerp_(value, 1.0 - share)
        self._scale([1.0 / weight for weight in weights])

    def after_step(self, last: bool) -> None:
        if self.is_alone:
            return
        self._send()
        if not self.config.overlap:
            self._merge()

    def _send(self) -> None:
        """Start to exchange all fragments, one by one, so that packing, sending and broadcasting overlap."""
        self.guard.check(self._fragments, weight=max(self.own_weights, default=1.0))
        exchange = self.state.pending.start(self.state.steps, self.state.steps + int(self.config.overlap))
        for index, weights in enumerate(self.state.weights):
            exchange.buckets.append(self._peers.start(index, self.state.steps, weights, self._background))

    @torch.no_grad()
    def _merge(self) -> None:
        """Merge the last exchange fragment by fragment."""
        node, exchange = self.topology.node, self.state.pending.take(self.state.steps, at_once=True)
        if exchange is None:
            return
        while exchange.buckets:
            pending = exchange.buckets.popleft()
            pending.arrived.wait()
            self._background.hands_out(pending.flat)
            weights = self.state.weights[pending.index]
            after = self._peers.weights_after(exchange.started, pending.index, weights)
            bucket = self._fragments[pending.index]
            if weights[node] == after[node] == 1.0:
                bucket.add(pending.flat)
            else:
                bucket.unpack(bucket.pack(weight=weights[node]).add_(pending.flat).div_(after[node]))
            self._peers.give_back(pending)
            self.state.weights[pending.index] = after
        self.state.synchronizations += 1

    @contextmanager
    def _offset_from_z(self, z: Mapping[int, Tensor], weights: Sequence[float]) -> Iterator[None]:
        """Offset the parameters from z as an optimizer such as SAM has offset them from x, to evaluate the loss.

        Args:
            z: By fragment, where it differs from x.
            weights: Push-sum weights, by fragment.
        """
        held = {index: self._fragments[index].pack() for index in z}
        for index, values in z.items():
            self._fragments[index].unpack(held[index] + values * (1.0 - weights[index]))
        yield
        for index, values in held.items():
            self._fragments[index].unpack(values)

    @torch.no_grad()
    def _scale(self, factors: Sequence[float]) -> None:
        for bucket, factor in zip(self._fragments, factors, strict=True):
            if factor != 1.0:
                bucket.unpack(bucket.pack(weight=factor))

    @property
    def own_weights(self) -> list[float]:
        """Return this node's push-sum weight of every fragment."""
        return [weights[self.topology.node] for weights in self.state.weights]

    @property
    def _share_of_updates(self) -> float:
        """Return the weight of this node's updates; the average over the nodes is 1."""
        share = self.topology.node_weight * self.topology.num_nodes
        return 1.0 if abs(share - 1.0) < 1e-9 else share

    # ---- a run ---------------------------------------------------------------------------------------------------

    def follow(self, replica: Replica) -> None:
        super().follow(replica)
        self._cut()

    def _cut(self) -> None:
        """Cut the parameters into flat fragments, in the same order on every rank."""
        config = self.config
        cut = [] if self.is_alone else self.replica.cut(config.fragments)
        self._fragments = [bucket for buckets in cut for bucket in buckets]
        self._peers = Peers(self._fragments, config.graph, self.topology, self._duplicate, self.wire, config.push_sum)
        self._compare_with_other_ranks()
        self._restart()

    def _restart(self) -> None:
        """Reset to equal weights with no pending exchange, because the replicas are equal."""
        self.state.weights = [[1.0] * self.topology.num_nodes for _ in self._fragments]
        self.state.pending.drop()
        self._peers.disagreement.forget()

    def _compare_with_other_ranks(self) -> None:
        """Raise an error if the graph differs between ranks, because a rank would wait forever."""
        if self.topology.inter is None or self.is_alone:
            return
        graph, size = self.config.graph, self.topology.num_nodes
        rounds = [
            partners_of(graph, size, step, index).send_to
            for step in range(_STEPS_COMPARED)
            for index in range(len(self._fragments))
        ]
        description = repr(([bucket.numel for bucket in self._fragments], rounds)).encode()
        digests = self.topology.inter.all_gather_object(hashlib.blake2b(description, digest_size=16).hexdigest())
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise ValueError(
                    f"{graph!r} gives rank {rank} other fragments or peers than rank 0, so ranks would wait for"
                    " messages that are never sent. Use the same arguments and seed on every rank, and let send_to"
                    " depend on its arguments only."
                )

    def _write_mean(self) -> None:
        """Write the mean ``sum x / sum w`` over all nodes to the replica, exactly.

        A pending exchange (``overlap``) does not change the sum, and is merged when training continues.
        """
        weighted = [
            (bucket, tuple(self._rank_weights(of_nodes)))
            for fragment, of_nodes in zip(self._fragments, self.state.weights, strict=True)
            for bucket in fragment.cut(self.replica.bucket_bytes)
        ]
        weighted += [(bucket, tuple(self.topology.weights)) for bucket in self.replica.buckets_of_buffers]
        self.guard.average([bucket for bucket, _ in weighted], weights=[weights for _, weights in weighted])

    def _rank_weights(self, of_nodes: Sequence[float]) -> list[float]:
        """Return each rank's weight in the mean, given the nodes' push-sum weights."""
        topology, total = self.topology, sum(of_nodes)
        return [
            of_nodes[node] / total * topology.weights[rank] / topology.node_weights[node]
            for rank, node in sorted((rank, node) for node, ranks in enumerate(topology.nodes) for rank in ranks)
        ]

    def finish(self) -> None:
        super().finish()
        if not self.is_alone:
            self._restart()

    # ---- state and logged values ---------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """``disagreement``: the distance of a node from the mean, relative to the parameters' norm, before mixing.

        It is estimated from up to 4096 elements of each fragment that this rank received at the last exchange. It is
        exact in expectation for uniformly random peers; a ring's neighbors are closer than that.
        """
        relative = self._peers.disagreement.relative()
        return {} if relative is None else {"disagreement": relative}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restart()
        expected, saved = self.state.weights, state.get("weights")
        if saved is not None and list(map(len, saved)) != list(map(len, expected)):
            raise ValueError(
                f"the checkpoint's gossip has {len(saved)} fragments on {len(saved[0]) if saved else 0} nodes, this"
                f" run {len(expected)} on {self.topology.num_nodes}. Resume with the same, or from the averaged"
                " parameters only."
            )
        self.state.pending.device = self.replica.device
        super().load_state_dict(state)
        if saved is None:
            self.state.weights = expected
