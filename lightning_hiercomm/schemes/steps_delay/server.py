"""A synchronous parameter server without a process of its own: every rank owns a shard of it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.background import Background
from lightning_hiercomm.comm.base import Communicator, Handle, finished
from lightning_hiercomm.comm.spares import Spares
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.fragments import whole_tensors
from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.optimizer_state import copied, is_elementwise, keep_state_here, optimizer_like

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
        context: The replica, from whose values the server starts, in buckets of at most its size; and the user's
            optimizer, whose state is not used. The wire casts gradients. Weights are sent as differences from those
            pulled last, unless the wire is raw.
        pull_group: This rank's inter-node process group for pulls; None if it has none.
        background: Runs steps and pulls.

    Attributes:
        buckets: The parameters.
        spares: Reusable memory for parameters.
    """

    def __init__(self, context: Context, pull_group: Communicator | None, background: Background) -> None:
        self.spares = Spares()
        self._parameters = context.replica.parameters
        self._topology = context.topology
        self._pull_group = pull_group
        self._background = background
        self.buckets: list[ServedBucket] = []
        trained = set(map(id, self._parameters))
        for group, values in enumerate(context.optimizer.param_groups):
            tensors = [tensor for tensor in dict.fromkeys(values["params"]) if id(tensor) in trained]
            fine = max(MIN_BUCKET_BYTES, -(-sum(tensor.nbytes for tensor in tensors) // MIN_BUCKETS))
            for bucket in whole_tensors(tensors, min(context.replica.bucket_bytes, fine)):
                self.buckets.append(ServedBucket(bucket, group, context))
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
        else:
            bucket.payload.zero_()
        summed = inter.reduce_scatter(bucket.mean, bucket.payload)

        @torch.no_grad()
        def step_and_pull() -> None:
            summed.wait()
            self._step(bucket, values)
            if pull:
                own = bucket.payload.chunk(pull_group.size)[pull_group.rank]
                own.copy_(bucket.values - bucket.pulled[bucket.own] if bucket.sends_differences else bucket.values)
                bucket.pull = pull_group.all_gather(bucket.payload, own)

        for value in values.values():
            if isinstance(value, Tensor):  # a tensor learning rate was cloned on the stream of training
                self._background.uses(value)
        bucket.stepped = self._background.submit(step_and_pull)
        if pull and bucket is self.buckets[-1]:  # earlier waits would delay the other buckets' steps
            for each in self.buckets:
                each.pull_ended = self._background.submit(each.end_pull)

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

    @torch.no_grad()
    def pulled(self) -> Iterator[tuple[ServedBucket, Tensor]]:
        """Wait for the weights that were pulled, gather them inside the node, and store them in their buckets.

        Yields:
            Each bucket, in order, with the weights pulled before, which are valid until the next one.
        """

        def gather(bucket: ServedBucket) -> tuple[ServedBucket, Tensor, Handle]:
            bucket.settle()
            flat = self.spares.take(bucket.pulled.numel(), bucket.payload.dtype, bucket.payload.device)
            flat[bucket.sent].copy_(bucket.payload)
            return bucket, flat, self._topology.gather_shards(flat)

        gathers = map(gather, self.buckets)
        started = deque(islice(gathers, 2))
        while started:
            bucket, payload, gathered = started.popleft()
            gathered.wait()
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
            started.extend(islice(gathers, 1))

    # ---- while nothing is in flight ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        for bucket in self.buckets:
            bucket.settle()

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
            bucket.hold_state(
                {
                    name: value.reshape(-1)[part.start :][: part.length]
                    if is_elementwise(value, name, part.tensor)
                    else value
                    for name, value in state.get(part.tensor, {}).items()
                }
                for part in bucket.parameters.values()
            )

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


class ServedBucket:
    """A bucket as one rank holds it: its shard of the server, and its node's state between two pulls.

    Flat tensors of the bucket have one equal shard per owner; the last ones may end with padding.

    Args:
        bucket: The parameters, of one param group.
        group: Index of the param group.
        context: The nodes, the wire, and the user's optimizer of all parameters.

    Attributes:
        sent: The elements of a flat tensor that this rank sends between nodes; none without an inter-node group.
        own: The elements among them that this rank owns.
        sent_slices: The slices of parameters in ``sent``; ``own_slices``: those in ``own``.
        parameters: The optimizer's parameters, views of ``values``, and the slices that the rank owns.
        values: The weights of the own elements; ``mean``: the mean of the nodes' gradients for them.
        payload: What this rank sends and receives: gradients during a push, weights during a pull.
        pulled: The weights pulled last, pre, of the whole bucket.
        mean_square: The state of the local rule ``dc_asgd``, of the whole bucket.
        stepped: The step after the last push; ``pull``: the all-gather after it; ``pull_ended``: the end of that.
    """

    def __init__(self, bucket: Bucket, group: int, context: Context) -> None:
        topology, wire = context.topology, context.wire
        self.bucket = bucket
        self.group = group
        shards = topology.num_shards * topology.num_nodes
        self.pulled = bucket.empty(shards)
        self.sends_differences = wire.codec.narrows(bucket.dtype) and not wire.raw
        self.sent = self.own = slice(0, 0)
        if topology.inter is not None:
            numel = self.pulled.numel() // shards
            first = topology.local_rank * topology.num_nodes * numel
            self.sent = slice(first, first + topology.num_nodes * numel)
            first += topology.inter.rank * numel
            self.own = slice(first, first + numel)
        self.sent_slices = bucket.between(self.sent.start, self.sent.stop)
        self.own_slices = bucket.between(self.own.start, self.own.stop)
        self.values = torch.empty_like(self.pulled[self.own])
        dtype = wire.codec.payload_dtype(bucket.dtype)
        self.mean = torch.empty_like(self.values, dtype=dtype)
        self.payload = torch.zeros_like(self.pulled[self.sent], dtype=dtype)
        self.parameters = {Parameter(values): part for part, values in self.own_slices.split(self.values)}
        self.optimizer = optimizer_like(context.optimizer, group, [*self.parameters])
        self.parts = bucket.in_cache_sized()
        self.mean_square = self.pulled.new_empty(0)
        self.restart()

    def restart(self) -> None:
        """Continue from the parameters' values, equal on all ranks; the optimizer's state stays."""
        self.stepped = self.pull = self.pull_ended = finished
        self.bucket.pack(self.pulled)
        self.values.copy_(self.pulled[self.own])
        self.mean_square.zero_()

    def end_pull(self) -> None:
        self.pull.wait()

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        self.stepped.wait()
        self.pull_ended.wait()

    def take_writes(self) -> None:
        """Copy to the shard what a program wrote to the parameters since the last pull.

        A narrow wire rounds what was pulled, so that elements that were not written keep the shard's values.
        """
        held, numel = self.own_slices.pack(), self.own_slices.numel
        values = self.values[:numel]
        values.copy_(torch.where(held == self.pulled[self.own][:numel], values, held))

    # ---- the optimizer's state, while nothing is in flight -------------------------------------------------------

    def state_by_element(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one number per element of the shard; zero where the optimizer has none."""
        flat = torch.zeros_like(self.values, dtype=dtype)
        for parameter, (_, values) in zip(self.parameters, self.own_slices.split(flat), strict=True):
            value = self.optimizer.state.get(parameter, {}).get(name)
            if is_elementwise(value, name, parameter):
                streams.keep_here(value)  # made on the stream of the server's steps
                values.copy_(value)
        return flat

    def hold_state(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Replace the optimizer's state by copies of these values, by parameter."""
        self.optimizer.state.clear()
        group = self.optimizer.param_groups[0]
        for parameter, state in zip(self.parameters, states, strict=True):
            for name, value in state.items():
                if isinstance(value, Tensor):  # torch keeps step counts on the CPU, unless a kernel reads them
                    stays = name == "step" and not (group.get("capturable") or group.get("fused"))
                    value = value.clone() if stays else value.to(parameter.device, copy=True)
                self.optimizer.state[parameter][name] = value

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimizer state, pulled weights, and the local rule's state."""
        states = (self.optimizer.state.get(parameter, {}) for parameter in self.parameters)
        return {
            "values": self.values.clone(),
            "payload": self.payload.clone(),
            "pulled": self.pulled.clone(),
            "mean_square": self.mean_square.clone(),
            "optimizer": [{name: copied(value) for name, value in state.items()} for state in states],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, of a run with the same topology, buckets and wire."""
        for name, tensor in (("values", self.values), ("payload", self.payload), ("pulled", self.pulled)):
            tensor.copy_(saved[name])
        if saved["mean_square"].shape == self.mean_square.shape:  # the local rule is the same
            self.mean_square.copy_(saved["mean_square"])
        self.hold_state(saved["optimizer"])
