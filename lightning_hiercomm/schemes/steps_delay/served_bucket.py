"""A bucket of parameters on one rank: the shard that it serves, and what its node pulled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.base import Handle, finished
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.optimizer_state import copied, is_elementwise, optimizer_like


class ServedBucket:
    """A bucket as one rank holds it: its shard of the server, and its node's state between two pulls.

    Flat tensors of the bucket have one equal shard per owner; the last ones may end with padding.

    Args:
        bucket: The parameters, of one param group.
        group: Index of the param group.
        optimizer: The user's optimizer of all parameters.
        topology: The nodes.
        wire: Payload type between nodes.

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

    stepped: Handle = finished
    pull: Handle = finished
    pull_ended: Handle = finished

    def __init__(self, bucket: Bucket, group: int, optimizer: Optimizer, topology: Topology, wire: Wire) -> None:
        self.bucket = bucket
        self.group = group
        self.shards = topology.num_shards * topology.num_nodes
        self.pulled = bucket.pack(multiple_of=self.shards)
        self.sends_differences = wire.codec.narrows(bucket.dtype) and not wire.raw
        self.sent = self.own = slice(0, 0)
        if topology.inter is not None:
            numel = self.pulled.numel() // self.shards
            first = topology.local_rank * topology.num_nodes * numel
            self.sent = slice(first, first + topology.num_nodes * numel)
            first += topology.inter.rank * numel
            self.own = slice(first, first + numel)
        self.sent_slices = bucket.between(self.sent.start, self.sent.stop)
        self.own_slices = bucket.between(self.own.start, self.own.stop)
        self.values = self.pulled[self.own].clone()
        dtype = wire.codec.payload_dtype(bucket.dtype)
        self.mean = torch.empty_like(self.values, dtype=dtype)
        self.payload = torch.zeros_like(self.pulled[self.sent], dtype=dtype)
        self.parameters = {Parameter(values): part for part, values in self.own_slices.split(self.values)}
        self.optimizer = optimizer_like(optimizer, group)
        self.optimizer.param_groups[0]["params"] = [*self.parameters]
        self.parts = bucket.in_cache_sized()
        self.mean_square = self.pulled.new_empty(0)

    def restart(self) -> None:
        """Continue from the parameters' values, equal on all ranks; the optimizer's state stays."""
        self.stepped = self.pull = self.pull_ended = finished
        self.bucket.pack(self.pulled)
        self.values.copy_(self.pulled[self.own])
        self.mean_square.zero_()

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

    def take_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take the shard's elements of an optimizer state for whole parameters."""
        self._hold(
            {
                name: value.reshape(-1)[part.start :][: part.length]
                if is_elementwise(value, name, part.tensor)
                else value
                for name, value in state.get(part.tensor, {}).items()
            }
            for part in self.parameters.values()
        )

    def _hold(self, states: Iterable[Mapping[str, Any]]) -> None:
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
        self._hold(saved["optimizer"])
