"""A synchronous parameter server without a process of its own: every rank owns a shard of it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, starmap
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import Communicator, Handle, finished
from lightning_hiercomm.comm.spares import Spares
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.optimizer_state import copied
from lightning_hiercomm.schemes.steps_delay.served_bucket import ServedBucket

T = TypeVar("T")

# A bucket's push follows its previous one, so with more buckets a link idles less between pushes. Very small ones cost
# the processors more time than the link.
MIN_BUCKETS = 8
MIN_BUCKET_BYTES = 2**18


class ShardedServer:
    """The global weights and the optimizer's state, cut into one shard per rank.

    For each bucket and iteration::

        push   reduce-scatter of the gradients between the nodes: the owner of a shard receives its mean
        step   the owner steps its shard, with the user's own optimizer class
        pull   all-gather between the nodes, then inside the node

    With N parameters of b bytes on M nodes, a push sends ``(M - 1) / M * N * b`` bytes per node, and so does a pull,
    spread over the node's links. Every rank with an inter-node process group owns a shard. A rank also has its shard of
    mean gradients, its messages and the weights pulled last.

    A push starts in the training thread, on the topology's communicators. Step and pull follow in the background, with
    a process group of their own. Call other methods only while nothing is in flight.

    Args:
        replica: What is trained; equal on all ranks. The server starts from its values, in buckets of at most its size.
        optimizer: The user's optimizer of these parameters, whose state is not used.
        topology: The nodes and their weights.
        pull_group: This rank's inter-node process group for pulls; None if it has none.
        background: Runs steps and pulls.
        wire: Payload type between nodes. Gradients are cast. Weights are sent as differences from those pulled last,
            unless the wire is raw.

    Attributes:
        buckets: The parameters.
        spares: Reusable memory for parameters.
    """

    def __init__(
        self,
        replica: Replica,
        optimizer: Optimizer,
        topology: Topology,
        pull_group: Communicator | None,
        background: Background,
        wire: Wire,
    ) -> None:
        self.spares = Spares()
        self._parameters = replica.parameters
        self._topology = topology
        self._pull_group = pull_group
        self._background = background
        self.buckets: list[ServedBucket] = []
        trained = set(map(id, replica.parameters))
        for group, values in enumerate(optimizer.param_groups):
            kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for parameter in values["params"]:
                if id(parameter) in trained:
                    kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            for tensors in kinds.values():
                whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
                fine = max(MIN_BUCKET_BYTES, -(-whole // MIN_BUCKETS))
                cut = Replica(tensors, bucket_bytes=min(replica.bucket_bytes, fine)).buckets
                self.buckets += [ServedBucket(bucket, group, optimizer, topology, wire) for bucket in cut]
        for bucket in self.buckets:
            for tensor in (bucket.values, bucket.mean, bucket.payload, bucket.pulled):
                background.uses(tensor)

    # ---- push, step and pull -------------------------------------------------------------------------------------

    @torch.no_grad()
    def push(self, bucket: ServedBucket, values: Mapping[str, Any], has_gradients: bool, pull: bool) -> None:
        """Start to send a bucket's gradients to their owners, who then step; waits for the bucket's previous push only.

        The gradients are copied before this returns.

        Args:
            bucket: All buckets are pushed in each iteration, in their order. One that was pulled is pushed after its
                weights were taken from :meth:`pulled`.
            values: The present values of the user's param group.
            has_gradients: Whether the parameters hold the node's mean gradients; otherwise these overflowed.
            pull: Whether :meth:`pulled` will return the weights after this step.
        """
        inter, pull_group = self._topology.inter, self._pull_group
        if inter is None or pull_group is None:
            return
        bucket.stepped.wait()  # the previous push used the same memory
        if has_gradients:
            bucket.pack_gradients(self._topology.node_weight)
        else:
            bucket.payload.zero_()
        summed = inter.reduce_scatter(bucket.mean, bucket.payload)

        @torch.no_grad()
        def step() -> None:
            summed.wait()
            bucket.step(values)
            if pull:
                bucket.start_pull(pull_group)

        for value in values.values():
            if isinstance(value, Tensor):  # a tensor learning rate was cloned on the stream of training
                self._background.uses(value)
        bucket.stepped = self._background.submit(step)

    def wait_for_pulls(self) -> None:
        """Let the background wait for the pulls, after all pushes, which an earlier wait would delay."""
        if self._pull_group is None:
            return
        for bucket in self.buckets:

            def end_pull(bucket: ServedBucket = bucket, stepped: Handle = bucket.stepped) -> None:
                stepped.wait()  # it has ended, but may have failed
                bucket.pull.wait()

            bucket.pull_ended = self._background.submit(end_pull)

    @torch.no_grad()
    def pulled(self) -> Iterator[Tensor]:
        """Wait for the weights that were pulled, and gather them inside the node.

        Yields:
            One flat tensor per bucket, in their order, to be returned to :attr:`spares` after its use.
        """

        def gather(bucket: ServedBucket) -> tuple[ServedBucket, Tensor, Handle]:
            bucket.pull_ended.wait()
            flat = bucket.bucket.empty(bucket.shards, bucket.payload.dtype, self.spares)
            flat[bucket.sent].copy_(bucket.payload)
            return bucket, flat, self._topology.gather_shards(flat)

        for bucket, payload, handle in _ahead(map(gather, self.buckets)):
            handle.wait()
            before = bucket.pulled
            if payload.dtype == before.dtype:
                yield payload
                continue
            weights = self.spares.take(before.numel(), before.dtype, before.device)
            if bucket.sends_differences:
                torch.add(before, payload, out=weights)
                self._background.uses(weights)  # the next pull sends the difference from them
            else:
                weights.copy_(payload)
            self.spares.give_back(payload)
            yield weights

    # ---- while nothing is in flight ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        for bucket in self.buckets:
            bucket.stepped.wait()
            bucket.pull_ended.wait()

    def weights(self) -> Iterator[Tensor]:
        """Yield the present weights, exact: one new flat tensor per bucket. Collective."""
        return self._gathered((bucket, bucket.values) for bucket in self.buckets)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return this rank's shards of weights and optimizer state, what it pulled, and its rule's state."""
        return [bucket.state_dict() for bucket in self.buckets]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore :meth:`state_dict`, of a run with the same topology, buckets and wire."""
        for bucket, saved in zip(self.buckets, state, strict=True):
            bucket.load_state_dict(saved)

    # ---- optimizer state of whole parameters ---------------------------------------------------------------------

    @torch.no_grad()
    def optimizer_state(self, only_on: int | None = None) -> dict[Tensor, dict[str, Any]]:
        """Settle, and return the optimizer's state for whole parameters, gathered bucket by bucket. Collective.

        Args:
            only_on: The only rank that keeps it, so that no other holds more than a few buckets. None: all ranks.

        Returns:
            For each parameter that has state, what the optimizer would hold without shards; empty on ranks that do not
            receive it.
        """
        self.settle()
        known = self._known_state()
        entries = []
        for bucket in self.buckets:
            items = (item for part in bucket.bucket.slices for item in known[part.tensor].items())
            kinds = {name: dtype for name, dtype in items if isinstance(dtype, torch.dtype)}
            entries += [(bucket, name, dtype) for name, dtype in sorted(kinds.items())]
        flats = self._gathered((bucket, bucket.state_by_element(name, dtype)) for bucket, name, dtype in entries)
        receives = only_on is None or only_on == self._topology.rank
        state: dict[Tensor, dict[str, Any]] = {}
        for tensor, values in known.items() if receives else ():
            state[tensor] = {
                name: torch.empty(tensor.shape, dtype=value, device=tensor.device)
                if isinstance(value, torch.dtype)
                else copied(value)
                for name, value in values.items()
            }
        for (bucket, name, _), flat in zip(entries, flats, strict=True):
            for part, elements in bucket.bucket.split(flat) if receives else ():
                if isinstance(known[part.tensor].get(name), torch.dtype):
                    state[part.tensor][name].view(-1)[part.start :][: part.length] = elements
        return {tensor: values for tensor, values in state.items() if values}

    def take_optimizer_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take an optimizer's state for whole parameters."""
        for bucket in self.buckets:
            bucket.take_state(state)

    def _known_state(self) -> dict[Tensor, dict[str, Any]]:
        """Return all ranks' :meth:`ServedBucket.state`, by tensor. Collective."""
        places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        own = [(places[id(tensor)], *rest) for bucket in self.buckets for tensor, *rest in bucket.state()]
        known: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for theirs in self._topology.world.all_gather_object(own):
            for place, name, value in theirs:
                values = known[self._parameters[place]]
                # a number of shape (1,) looks like one per element where a rank owns one element of the tensor
                if name not in values or not isinstance(value, torch.dtype):
                    values[name] = value
        return known

    @torch.no_grad()
    def _gathered(self, shards: Iterable[tuple[ServedBucket, Tensor]]) -> Iterator[Tensor]:
        """Yield the shards of all ranks as one flat tensor, for pairs of a bucket and this rank's shard."""

        def gather(bucket: ServedBucket, own: Tensor) -> tuple[Tensor, Handle]:
            flat, inter = own.new_empty(bucket.pulled.numel()), self._topology.inter
            part = flat[bucket.own].copy_(own)
            return flat, finished if inter is None else inter.all_gather(flat[bucket.sent], part)

        for flat, handle in _ahead(starmap(gather, shards)):
            handle.wait()
            self._topology.gather_shards(flat).wait()
            yield flat


def _ahead(started: Iterator[T], ahead: int = 2) -> Iterator[T]:
    """Yield the items, and start a few of them ahead."""
    waiting = deque(islice(started, ahead))
    while waiting:
        yield waiting.popleft()
        waiting.extend(islice(started, 1))
