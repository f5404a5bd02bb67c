"""A synchronous parameter server without a process of its own: every rank owns a shard of it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import Communicator, Handle
from lightning_hiercomm.comm.spares import Spares
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.fragments import whole_tensors
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.optimizer_state import copied, is_elementwise, keep_state_here
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
            tensors = [tensor for tensor in dict.fromkeys(values["params"]) if id(tensor) in trained]
            fine = max(MIN_BUCKET_BYTES, -(-sum(tensor.nbytes for tensor in tensors) // MIN_BUCKETS))
            for bucket in whole_tensors(tensors, min(replica.bucket_bytes, fine)):
                self.buckets.append(ServedBucket(bucket, group, optimizer, topology, wire))
        for served in self.buckets:
            for tensor in (served.values, served.mean, served.payload, served.pulled):
                background.uses(tensor)

    # ---- push, step and pull -------------------------------------------------------------------------------------

    @torch.no_grad()
    def push(self, bucket: ServedBucket, values: Mapping[str, Any], has_gradients: bool, pull: bool) -> None:
        """Start to send a bucket's gradients to their owners, who then step; waits for the bucket's previous push only.

        The gradients are copied before this returns.

        Args:
            bucket: All buckets are pushed in each iteration, in their order. One that was pulled is pushed after
                :meth:`pulled` has yielded it.
            values: The present values of the user's param group.
            has_gradients: Whether the parameters hold the node's mean gradients; otherwise these overflowed.
            pull: Whether the weights after this step are pulled.
        """
        inter, pull_group = self._topology.inter, self._pull_group
        if inter is None or pull_group is None:
            return
        bucket.stepped.wait()  # the previous push used the same memory
        if has_gradients:
            bucket.sent_slices.pack_gradients(bucket.payload, self._topology.node_weight)
            bucket.payload[bucket.sent_slices.numel :].zero_()
        else:
            bucket.payload.zero_()
        summed = inter.reduce_scatter(bucket.mean, bucket.payload)

        @torch.no_grad()
        def step_and_pull() -> None:
            summed.wait()
            self._step(bucket, values)
            if pull:
                self._start_pull(bucket, pull_group)

        for value in values.values():
            if isinstance(value, Tensor):  # a tensor learning rate was cloned on the stream of training
                self._background.uses(value)
        bucket.stepped = self._background.submit(step_and_pull)

    def _step(self, bucket: ServedBucket, values: Mapping[str, Any]) -> None:
        """Step this rank's shard with the mean gradient and the present values of the user's param group."""
        optimizer = bucket.optimizer
        optimizer.param_groups[0].update(values)
        # an optimizer of another package may keep the gradient itself, while the next push overwrites `mean`
        is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
        mean = bucket.mean.to(bucket.values.dtype, copy=not is_of_torch)
        for parameter, (_, gradient) in zip(bucket.parameters, bucket.own_slices.split(mean), strict=True):
            parameter.grad = gradient
            keep_state_here(optimizer, parameter)
        if bucket.parameters:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _start_pull(self, bucket: ServedBucket, group: Communicator) -> None:
        """Start the all-gather of the weights, or of their differences from the last pulled ones."""
        own = bucket.payload[group.rank * bucket.values.numel() :][: bucket.values.numel()]
        own.copy_(bucket.values - bucket.pulled[bucket.own] if bucket.sends_differences else bucket.values)
        bucket.pull = group.all_gather(bucket.payload, own)

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
    def pulled(self) -> Iterator[tuple[ServedBucket, Tensor]]:
        """Wait for the weights that were pulled, gather them inside the node, and store them in their buckets.

        Yields:
            Each bucket, in order, with the weights pulled before, which are valid until the next one.
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
                bucket.pulled = payload
            else:
                bucket.pulled = self.spares.take(before.numel(), before.dtype, before.device)
                if bucket.sends_differences:
                    torch.add(before, payload, out=bucket.pulled)
                    self._background.uses(bucket.pulled)  # the next pull sends the difference from them
                else:
                    bucket.pulled.copy_(payload)
                self.spares.give_back(payload)
            yield bucket, before
            self.spares.give_back(before)

    # ---- while nothing is in flight ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        for bucket in self.buckets:
            bucket.stepped.wait()
            bucket.pull_ended.wait()

    @torch.no_grad()
    def gather(self, bucket: ServedBucket, own: Tensor) -> Tensor:
        """Return all ranks' shards of a bucket as one new flat tensor, given this rank's. Collective."""
        flat, inter = own.new_empty(bucket.pulled.numel()), self._topology.inter
        part = flat[bucket.own].copy_(own)
        if inter is not None:
            inter.all_gather(flat[bucket.sent], part).wait()
        self._topology.gather_shards(flat).wait()
        return flat

    def state_dict(self) -> list[dict[str, Any]]:
        """Return this rank's shards of weights and optimizer state, what it pulled, and its local rule's state."""
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
        known, state = self._known_state(), dict[Tensor, dict[str, Any]]()
        receives = only_on is None or only_on == self._topology.rank
        for tensor, values in known.items() if receives else ():
            state[tensor] = {
                name: torch.empty(tensor.shape, dtype=value, device=tensor.device)
                if isinstance(value, torch.dtype)
                else copied(value)
                for name, value in values.items()
            }
        for bucket in self.buckets:
            items = (item for part in bucket.bucket.slices for item in known.get(part.tensor, {}).items())
            dtypes = {name: dtype for name, dtype in items if isinstance(dtype, torch.dtype)}
            for name, dtype in sorted(dtypes.items()):
                flat = self.gather(bucket, bucket.state_by_element(name, dtype))
                for part, elements in bucket.bucket.split(flat) if receives else ():
                    if isinstance(known.get(part.tensor, {}).get(name), torch.dtype):
                        state[part.tensor][name].view(-1)[part.start :][: part.length] = elements
        return state

    def take_optimizer_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take an optimizer's state for whole parameters."""
        for bucket in self.buckets:
            bucket.take_state(state)

    def _known_state(self) -> dict[Tensor, dict[str, Any]]:
        """Return all ranks' optimizer state; of what has one number per element, the dtype only. Collective."""

        def on_cpu(value: Any) -> Any:
            return copied(value.detach()).cpu() if isinstance(value, Tensor) else value

        places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        own = [
            (places[id(part.tensor)], name, value.dtype if is_elementwise(value, name, parameter) else on_cpu(value))
            for bucket in self.buckets
            for parameter, part in bucket.parameters.items()
            for name, value in bucket.optimizer.state.get(parameter, {}).items()
        ]
        known: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for theirs in self._topology.world.all_gather_object(own):
            for place, name, value in theirs:
                values = known[self._parameters[place]]
                # a number of shape (1,) looks like one per element where a rank owns one element of the tensor
                if name not in values or not isinstance(value, torch.dtype):
                    values[name] = value
        return known


def _ahead(started: Iterator[T], ahead: int = 2) -> Iterator[T]:
    """Yield the items, and start a few of them ahead."""
    waiting = deque(islice(started, ahead))
    while waiting:
        yield waiting.popleft()
        waiting.extend(islice(started, 1))
