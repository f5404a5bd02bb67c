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
from lightning_hiercomm.nodes.bucket import BUCKET_BYTES
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.optimizer_state import copied, optimizer_like
from lightning_hiercomm.schemes.steps_delay.buckets import ShardedBucket, sharded_buckets
from lightning_hiercomm.schemes.steps_delay.shards import Hyperparameters, Shard, State, dtypes_of, like_present

T = TypeVar("T")


class ShardedServer:
    """The global weights and the optimizer's state, cut into one shard per rank.

    For each bucket and iteration::

        push   reduce-scatter of the gradients between the nodes: the owner of a shard receives its mean
        step   the owner steps its shard, with the user's own optimizer class
        pull   all-gather between the nodes, then inside the node

    With N parameters of b bytes on M nodes, a push sends ``(M - 1) / M * N * b`` bytes per node, and so does a pull,
    spread over the node's links. Every rank with an inter-node process group owns a shard. A rank also has its shard of
    mean gradients, its messages and, on a narrow wire, a copy of its shard.

    A push starts in the training thread, on the topology's communicators. Step and pull follow in the background, with
    a process group of their own. Call other methods only while nothing is in flight.

    Args:
        parameters: What is trained; equal on all ranks. The server starts from their values.
        optimizer: The user's optimizer of these parameters, with the param groups but without the state.
        topology: The nodes and their weights.
        pull_group: This rank's inter-node process group for pulls; None if it has none.
        background: Runs steps and pulls.
        wire: Payload type between nodes. Gradients are cast. Weights are sent as differences from those pulled last,
            unless the wire is raw.
        bucket_bytes: Upper bound of a bucket's size. A small model has smaller ones.

    Attributes:
        buckets: The parameters.
        spares: Reusable memory for parameters.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: Optimizer,
        topology: Topology,
        pull_group: Communicator | None,
        background: Background,
        wire: Wire,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.wire = wire
        self.spares = Spares()
        self._topology = topology
        self._pull_group = pull_group
        self._background = background
        self._owners = [
            topology.nodes[node][local] for local in range(topology.num_shards) for node in range(topology.num_nodes)
        ]
        self.buckets = list(sharded_buckets(parameters, optimizer, len(self._owners), bucket_bytes))
        self._shards = [self._new_shard(bucket, optimizer) for bucket in self.buckets]

    def _new_shard(self, bucket: ShardedBucket, optimizer: Optimizer) -> Shard:
        flat = bucket.pack()
        values = self._own(flat).clone()
        payload_dtype = self.wire.codec.payload_dtype(values.dtype)
        mean = torch.empty_like(values, dtype=payload_dtype)
        payload = torch.zeros_like(self._topology.own_shard(flat), dtype=payload_dtype)
        last_pulled = values.clone() if self.wire.compresses(values.dtype) and not self.wire.raw else None
        for tensor in (values, mean, payload, last_pulled):
            if tensor is not None:
                self._background.uses(tensor)
        shard = Shard(bucket, values, mean, payload, optimizer_like(optimizer, bucket.group), last_pulled)
        shard.own(list(bucket.slices(*self._range(bucket))))
        return shard

    def _range(self, bucket: ShardedBucket) -> tuple[int, int]:
        """The elements of a bucket that this rank owns."""
        inter = self._topology.inter
        if inter is None:
            return 0, 0
        begin = (self._topology.local_rank * inter.size + inter.rank) * bucket.shard_numel
        return begin, begin + bucket.shard_numel

    def _own(self, flat: Tensor) -> Tensor:
        """Return this rank's shard of a flat tensor: a view, empty for a rank that owns none."""
        part, inter = self._topology.own_shard(flat), self._topology.inter
        return part if inter is None else part.chunk(inter.size)[inter.rank]

    # ---- push, step and pull -------------------------------------------------------------------------------------

    @torch.no_grad()
    def push(self, index: int, changes: Hyperparameters, has_gradients: bool, pull: bool) -> None:
        """Start to send a bucket's gradients to their owners, who then step; waits for the bucket's previous push only.

        The gradients are copied before this returns.

        Args:
            index: The bucket's number. All buckets are pushed in each iteration, in their order. One that was pulled is
                pushed after its weights were taken from :meth:`pulled`.
            changes: Values in the user's param groups that the server does not have yet.
            has_gradients: Whether the parameters hold the node's mean gradients; otherwise these overflowed.
            pull: Whether :meth:`pulled` will return the weights after this step.
        """
        shard, inter, pull_group = self._shards[index], self._topology.inter, self._pull_group
        if inter is None or pull_group is None:
            return
        shard.stepped.wait()  # the previous push used the same memory
        if has_gradients:
            begin = self._topology.local_rank * shard.payload.numel()
            shard.bucket.pack_gradients(shard.payload, begin, self._topology.node_weight)
        else:
            shard.payload.zero_()
        summed = inter.reduce_scatter(shard.mean, shard.payload)

        def step() -> None:
            summed.wait()
            shard.step(changes)
            if pull:
                shard.start_pull(pull_group)

        for value in changes[shard.bucket.group].values():
            if isinstance(value, Tensor):  # a tensor learning rate was cloned on the stream of training
                self._background.uses(value)
        shard.stepped = self._background.submit(step)

    def wait_for_pulls(self) -> None:
        """Let the background wait for the pulls, after all pushes, which an earlier wait would delay."""
        if self._pull_group is None:
            return
        for shard in self._shards:

            def end_pull(shard: Shard = shard, stepped: Handle = shard.stepped) -> None:
                stepped.wait()  # it has ended, but may have failed
                shard.pull.wait()

            shard.pulled = self._background.submit(end_pull)

    @torch.no_grad()
    def pulled(self, last: Sequence[Tensor]) -> Iterator[Tensor]:
        """Wait for the weights that were pulled, and gather them inside the node.

        Args:
            last: The weights that this, or :meth:`restart`, had last; one flat tensor per bucket.

        Yields:
            One flat tensor per bucket, in their order, to be returned to :attr:`spares` after its use.
        """

        def gather(shard: Shard) -> tuple[Tensor, Handle]:
            shard.pulled.wait()
            flat = shard.bucket.empty(shard.payload.dtype, self.spares)
            self._topology.own_shard(flat).copy_(shard.payload)
            return flat, self._topology.gather_shards(flat)

        for (payload, handle), before in zip(_ahead(map(gather, self._shards)), last, strict=True):
            handle.wait()
            if payload.dtype == before.dtype:
                yield payload
                continue
            weights = self.spares.take(before.numel(), before.dtype, before.device)
            if self.wire.raw:
                weights.copy_(payload)
            else:
                torch.add(before, payload, out=weights)
            self.spares.give_back(payload)
            yield weights

    # ---- while nothing is in flight ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        for shard in self._shards:
            shard.stepped.wait()
            shard.pulled.wait()

    def weights(self) -> Iterator[Tensor]:
        """Yield the present weights, exact: one new flat tensor per bucket. Collective."""
        return self._gathered((shard.bucket.shard_numel, shard.values) for shard in self._shards)

    @torch.no_grad()
    def restart(self, weights: Sequence[Tensor]) -> None:
        """Continue from other weights, equal on all ranks, one flat tensor per bucket; the optimizer state stays."""
        for shard, flat in zip(self._shards, weights, strict=True):
            shard.stepped = shard.pull = shard.pulled = finished
            shard.values.copy_(self._own(flat))
            if shard.last_pulled is not None:
                shard.last_pulled.copy_(shard.values)

    @torch.no_grad()
    def take_writes(self, last: Sequence[Tensor]) -> None:
        """Copy to this rank's shards what a program wrote to the parameters; not collective.

        Args:
            last: What the parameters held before, as for :meth:`pulled`. A narrow wire rounds it, so that elements that
                were not written keep the shard's values.
        """
        for shard, before in zip(self._shards, last, strict=True):
            was = self._own(before)
            for part in shard.bucket.slices(*self._range(shard.bucket)):
                here = slice(part.offset, part.offset + part.numel)
                held = part.tensor.detach().reshape(-1)[part.start : part.end]
                shard.values[here] = torch.where(held == was[here], shard.values[here], held)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return this rank's shards of weights and optimizer state."""
        return [shard.state_dict() for shard in self._shards]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore :meth:`state_dict`, of a run with the same topology, buckets and wire."""
        for shard, saved in zip(self._shards, state, strict=True):
            shard.load_state_dict(saved)

    # ---- param groups --------------------------------------------------------------------------------------------

    def groups(self) -> dict[int, dict[str, Any]]:
        """Return the values in the optimizers' param groups by the index of the user's group. Collective."""
        own = {shard.bucket.group: shard.group for shard in self._shards if shard.owns_elements}
        on_cpu = {
            index: {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}
            for index, values in own.items()
        }
        everyone = self._topology.world.all_gather_object(on_cpu)
        return {index: own.get(index, values) for theirs in reversed(everyone) for index, values in theirs.items()}

    def set_groups(self, groups: Mapping[int, Mapping[str, Any]]) -> None:
        """Set values in the optimizers' param groups, as :meth:`groups` returns them."""
        for shard in self._shards:
            shard.set_group(like_present(groups.get(shard.bucket.group, {}), shard.group))

    # ---- optimizer state of whole parameters ---------------------------------------------------------------------

    def take_optimizer_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take this rank's shards of a state for whole parameters, as :meth:`optimizer_state` returns it."""
        for shard in self._shards:
            shard.take_state(state)

    @torch.no_grad()
    def optimizer_state(self, only_on: int | None = None) -> dict[Tensor, dict[str, Any]]:
        """Return the optimizer's state for whole parameters, gathered bucket by bucket. Collective.

        Args:
            only_on: The only rank that keeps it, so that no other holds more than a few buckets. None: all ranks.

        Returns:
            For each parameter that has state, what the optimizer would hold without shards; empty on ranks that do not
            receive it.
        """
        known = self._known_state()
        entries = [
            (shard, pieces, name, dtype)
            for shard, pieces in zip(self._shards, known, strict=True)
            for name, dtype in dtypes_of(pieces)
        ]
        flats = self._gathered(
            (shard.bucket.shard_numel, shard.state_by_element(name, dtype)) for shard, _, name, dtype in entries
        )
        receives = only_on is None or only_on == self._topology.rank
        state: dict[Tensor, dict[str, Any]] = {}
        for (shard, pieces, name, dtype), flat in zip(entries, flats, strict=True):
            for piece, (part, values) in enumerate(shard.bucket.bucket.split(flat)) if receives else ():
                if isinstance(pieces[piece].get(name), torch.dtype):
                    held = state.setdefault(part.tensor, {})
                    if name not in held:
                        held[name] = torch.empty(part.tensor.shape, dtype=dtype, device=part.tensor.device)
                    held[name].view(-1)[part.start : part.start + part.length] = values
        for shard, pieces in zip(self._shards, known, strict=True) if receives else ():
            for piece, values_by_name in pieces.items():
                for name, value in values_by_name.items():
                    if not isinstance(value, torch.dtype):
                        tensor = shard.bucket.bucket.slices[piece].tensor
                        state.setdefault(tensor, {}).setdefault(name, copied(value))
        return state

    def _known_state(self) -> list[State]:
        """Return all ranks' :meth:`Shard.state` of each bucket. Collective."""
        everyone = self._topology.world.all_gather_object([shard.state() for shard in self._shards])
        known: list[State] = [defaultdict(dict) for _ in self._shards]
        for theirs in everyone:
            for pieces, merged in zip(theirs, known, strict=True):
                for piece, values in pieces.items():
                    merged[piece].update(values)
        return known

    @torch.no_grad()
    def _gathered(self, shards: Iterable[tuple[int, Tensor]]) -> Iterator[Tensor]:
        """Yield the shards of all ranks as one flat tensor, for pairs of their size and this rank's own."""

        def gather(numel: int, own: Tensor) -> tuple[Tensor, Handle]:
            flat, inter = own.new_empty(len(self._owners) * numel), self._topology.inter
            part = self._own(flat).copy_(own)
            return flat, finished if inter is None else inter.all_gather(self._topology.own_shard(flat), part)

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
