"""Averages the gradients of a module that is sharded over its node during the backward pass."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.autocast import outside_autocast
from lightning_hiercomm.comm.base import Handle
from lightning_hiercomm.comm.dtensor import local, whole
from lightning_hiercomm.nodes.bucket import BUCKETS_IN_FLIGHT
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.shards import placed_as, shard_specs
from lightning_hiercomm.schemes.gradient_path import InterNodeMean


class ShardedGradients:
    """Averages a rank's shards of gradients over the nodes, in place. A gradient that some ranks lack counts as zero.

    Gradients are sent in buckets, those of the last parameters first, a few buckets at a time, in the same order on all
    nodes. A bucket is sent when the backward pass has written all its gradients, and the rest at its end. A backward
    pass may write a gradient several times (FSDP2, if the forward pass calls a module several times). If the first
    backward pass does so on any rank, all buckets are sent at the end.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        path: InterNodeMean,
        topology: Topology,
        node: Mapping[str, int],
        bucket_bytes: int,
    ) -> None:
        self.parameters = list(dict.fromkeys(parameters))
        self.path = path
        self.topology = topology
        held = {id(local(parameter)): parameter for parameter in reversed(self.parameters)}
        shares = shard_specs(self.parameters, node)
        self._buckets = Replica(map(local, held.values()), (), bucket_bytes, shares=shares).buckets
        # the parameters of each bucket, in the order of its pieces
        self._owners = [[held[id(piece.tensor)] for piece in bucket.slices] for bucket in self._buckets]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._written) for parameter in self.parameters]
        self._leaves_early: bool | None = None  # None until the first backward pass has ended
        self._is_backward = False
        self._times_written: Counter[int] = Counter()
        self._written_in: dict[int, torch.cuda.Stream] = {}
        self._sent = 0
        self._in_flight: deque[tuple[int, Tensor, Handle]] = deque()
        self._missing: dict[int, Tensor] = {}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Enclose a backward pass that completes the gradients, and average them at its end. Collective."""
        self._times_written.clear()
        self._written_in.clear()
        self._is_backward = True
        try:
            yield
        finally:
            self._is_backward = False
        self.average()
        if self._leaves_early is None:
            several = torch.tensor([max(self._times_written.values(), default=0)], device=self._device)
            self.topology.world.all_reduce(several, op="max").wait()
            self._leaves_early = int(several) <= 1

    @outside_autocast()
    @torch.no_grad()
    def average(self) -> None:
        """Average the gradients that were not sent yet, and wait for all. Collective."""
        while self._sent < len(self._buckets):
            self._send()
        # a gradient of zeros differs from none: the optimizer takes a step with it, with decay and momentum
        are_here = [parameter.grad is not None for parameter in self.parameters]
        has_all = all(are_here)  # a copy from the device would make the host wait
        are_somewhere = torch.ones(len(are_here), dtype=torch.uint8, device=self._device)
        if not has_all:
            are_somewhere = torch.tensor(are_here, dtype=torch.uint8, device=self._device)
        inter = self.topology.inter  # ranks of a node with the same parameters use the same ones
        assert inter is not None
        presence = inter.all_reduce(are_somewhere, op="max", waiting=True)
        while self._in_flight:
            self._finish()
        self._sent = 0
        presence.wait()
        missing, self._missing = self._missing, {}
        if has_all:
            return
        for parameter, is_somewhere in zip(self.parameters, are_somewhere.tolist(), strict=True):
            if is_somewhere and parameter.grad is None:
                gradient = missing.get(id(parameter))
                parameter.grad = whole(torch.zeros_like(local(parameter)) if gradient is None else gradient, parameter)

    @outside_autocast()
    @torch.no_grad()
    def _written(self, parameter: Tensor) -> None:
        if not self._is_backward:
            return
        self._times_written[id(parameter)] += 1
        if streams.has(self._device):  # FSDP2 has its own for what it shards
            self._written_in[id(parameter)] = streams.current(self._device)
        if not self._leaves_early:
            return
        if self._times_written[id(parameter)] > 1:
            raise RuntimeError(
                f"a gradient of shape {tuple(parameter.shape)} was written again after it was sent to other nodes,"
                " because in the first step every gradient was written once. Call each module equally often in every"
                " step, or average parameters instead: PeriodicAveraging(1)"
            )
        while self._sent < len(self._buckets) and all(id(p) in self._times_written for p in self._owners[self._sent]):
            self._send()

    def _send(self) -> None:
        index, bucket = self._sent, self._buckets[self._sent]
        self._sent += 1
        for stream in {self._written_in[id(p)] for p in self._owners[index] if id(p) in self._written_in}:
            streams.current(self._device).wait_stream(stream)
        flat = bucket.empty(multiple_of=self.topology.holders[bucket.held_by].num_shards)
        for parameter, (piece, values) in zip(self._owners[index], bucket.split(flat), strict=True):
            if parameter.grad is None:
                values.zero_()
            else:
                parameter.grad = placed_as(parameter.grad, parameter)
                values.copy_(local(parameter.grad).reshape(-1)[piece.start : piece.start + piece.length])
        contents = ((owner, piece.start) for owner, piece in zip(self._owners[index], bucket.slices, strict=True))
        handle = self.path.reduce(flat, index, contents, bucket.held_by, waiting=not self._leaves_early)
        self._in_flight.append((index, flat, handle))
        if len(self._in_flight) == BUCKETS_IN_FLIGHT:
            self._finish()

    def _finish(self) -> None:
        index, flat, averaged = self._in_flight.popleft()
        averaged.wait()
        streams.keep_here(flat)  # it may have been allocated on the stream of the backward pass
        for parameter, (piece, values) in zip(self._owners[index], self._buckets[index].split(flat), strict=True):
            if parameter.grad is not None:
                gradient = local(parameter.grad)
            elif id(parameter) in self._missing or bool(values.any()):
                gradient = self._missing.setdefault(id(parameter), torch.zeros_like(local(parameter)))
            else:
                continue
            if piece.covers_tensor():
                gradient.copy_(values.view(gradient.shape))
            else:
                gradient.view(-1)[piece.start : piece.start + piece.length] = values

    @property
    def _device(self) -> torch.device:
        return local(self.parameters[0]).device if self.parameters else torch.device("cpu")
