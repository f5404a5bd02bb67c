"""A bucket of parameters on one rank: the shard that it serves, and what its node pulled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hiercomm.comm import streams
from lightning_hiercomm.comm.base import Communicator, Handle, finished
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.optimizer_state import (
    changed,
    copied,
    is_elementwise,
    keep_state_here,
    optimizer_like,
    values_of,
)
from lightning_hiercomm.schemes.optimizer_trial import NoCollectives


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
        gradients: The slices of parameters whose gradients this rank sends.
        parameters: The optimizer's parameters, views of ``values``, and the slices that the rank owns.
        values: The weights of the own elements; ``mean``: the mean of the nodes' gradients for them.
        payload: What this rank sends and receives: gradients during a push, weights during a pull.
        pulled: The weights pulled last, pre, of the whole bucket.
        parts: Cache-sized parts of the bucket, to which the local rule is applied.
        rule_state: The local rule's tensors, for each of these parts.
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
        self.sends_differences = wire.compresses(bucket.dtype) and not wire.raw
        self.sent = self.own = slice(0, 0)
        if topology.inter is not None:
            numel = self.pulled.numel() // self.shards
            first = topology.local_rank * topology.num_nodes * numel
            self.sent = slice(first, first + topology.num_nodes * numel)
            first += topology.inter.rank * numel
            self.own = slice(first, first + numel)
        self.gradients = bucket.between(self.sent.start, self.sent.stop)
        self.values = self.pulled[self.own].clone()
        dtype = wire.codec.payload_dtype(bucket.dtype)
        self.mean = torch.empty_like(self.values, dtype=dtype)
        self.payload = torch.zeros_like(self.pulled[self.sent], dtype=dtype)
        self._owned = bucket.between(self.own.start, self.own.stop)
        self.parameters = {Parameter(values): part for part, values in self._owned.split(self.values)}
        self.optimizer = optimizer_like(optimizer, group)
        self.optimizer.param_groups[0]["params"] = [*self.parameters]
        self.parts = bucket.in_cache_sized()
        self.rule_state: list[dict[str, Tensor]] = [{} for _ in self.parts]

    def restart(self) -> None:
        """Continue from the parameters' values, equal on all ranks; the optimizer's state stays."""
        self.stepped = self.pull = self.pull_ended = finished
        self.bucket.pack(self.pulled)
        self.values.copy_(self.pulled[self.own])
        self.rule_state = [{} for _ in self.parts]

    # ---- push, step and pull -------------------------------------------------------------------------------------

    def pack_gradients(self, weight: float) -> None:
        """Write ``weight`` times the gradients that this rank sends to the payload."""
        self.payload[self.gradients.numel :].zero_()
        self.gradients.pack_gradients(self.payload, weight)

    def step(self, values: Mapping[str, Any]) -> None:
        """Step the weights with the mean gradient and the present values of the user's param group."""
        is_of_torch = type(self.optimizer).__module__.startswith("torch.optim.")
        for parameter, (_, mean) in zip(self.parameters, self._owned.split(self.mean), strict=True):
            # another package's may keep the gradient itself, while the next push overwrites `mean`
            parameter.grad = mean.to(parameter.dtype, copy=not is_of_torch)
            keep_state_here(self.optimizer, parameter)
        self.optimizer.param_groups[0].update(values)
        if not self.parameters:
            return
        if is_of_torch:
            self.optimizer.step()
        else:
            self._step_checked()
        self.optimizer.zero_grad(set_to_none=True)

    def _step_checked(self) -> None:
        """Step, and find what no trial has found; the checks take as long as a step of a small shard."""
        (group,) = self.optimizer.param_groups
        before, name = values_of(group), f"{type(self.optimizer).__name__}.step()"
        reason = "With StepsDelay every rank steps another shard of the parameters, "
        with NoCollectives(
            f"{name} communicates with other ranks. {reason}so its collectives would not match. Use AllReduce()"
        ):
            self.optimizer.step()
        if names := sorted(changed(before, values_of(group))):
            raise RuntimeError(
                f"{name} changed {names[0]!r} in param_groups. {reason}and only the program may change its groups. Use"
                " AllReduce()"
            )

    def start_pull(self, group: Communicator) -> None:
        """Start the all-gather of the weights, or of their differences from the last pulled ones."""
        own = self.payload[group.rank * self.values.numel() :][: self.values.numel()]
        own.copy_(self.values - self.pulled[self.own] if self.sends_differences else self.values)
        self.pull = group.all_gather(self.payload, own)

    # ---- while nothing is in flight ------------------------------------------------------------------------------

    def take_writes(self) -> None:
        """Copy to the shard what a program wrote to the parameters since the last pull.

        A narrow wire rounds what was pulled, so that elements that were not written keep the shard's values.
        """
        held, numel = self._owned.pack(), self._owned.numel
        values = self.values[:numel]
        values.copy_(torch.where(held == self.pulled[self.own][:numel], values, held))

    def state(self) -> Iterator[tuple[Tensor, str, Any]]:
        """Yield the optimizer's state: a tensor, a name, and a value or the dtype of one number per element."""
        for parameter, part in self.parameters.items():
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if is_elementwise(value, name, parameter):
                    yield part.tensor, name, value.dtype
                else:
                    yield part.tensor, name, copied(value.detach()).cpu() if isinstance(value, Tensor) else value

    def state_by_element(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one number per element of the shard; zero where the optimizer has none."""
        flat = torch.zeros_like(self.values, dtype=dtype)
        for parameter, (_, values) in zip(self.parameters, self._owned.split(flat), strict=True):
            value = self.optimizer.state.get(parameter, {}).get(name)
            if is_elementwise(value, name, parameter):
                streams.keep_here(value)  # made on the stream of the server's steps
                values.copy_(value)
        return flat

    def take_state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take the shard's elements of an optimizer state for whole parameters."""
        self.optimizer.state.clear()
        for parameter, part in self.parameters.items():
            for name, value in state.get(part.tensor, {}).items():
                if is_elementwise(value, name, part.tensor):
                    value = value.reshape(-1)[part.start :][: part.length]
                self.optimizer.state[parameter][name] = self._placed(name, value, parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimizer state, pulled weights, and the rule's state, which does not depend on its parts."""
        states = (self.optimizer.state.get(parameter, {}) for parameter in self.parameters)
        return {
            "values": self.values.clone(),
            "payload": self.payload.clone(),
            "pulled": self.pulled.clone(),
            "optimizer": [{name: copied(value) for name, value in state.items()} for state in states],
            "rule": {name: torch.cat([state[name] for state in self.rule_state]) for name in self.rule_state[0]},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, of a run with the same topology, buckets and wire."""
        for name, tensor in (("values", self.values), ("payload", self.payload), ("pulled", self.pulled)):
            tensor.copy_(saved[name])
        self.optimizer.state.clear()
        for parameter, state in zip(self.parameters, saved["optimizer"], strict=True):
            for name, value in state.items():
                self.optimizer.state[parameter][name] = self._placed(name, value, parameter)
        rule = {name: values.split([part.numel for part in self.parts]) for name, values in saved["rule"].items()}
        self.rule_state = [
            {name: values[place].to(part.device, copy=True) for name, values in rule.items()}
            for place, part in enumerate(self.parts)
        ]

    def _placed(self, name: str, value: Any, parameter: Tensor) -> Any:
        """Return a copy of a value on the device where the optimizer needs it: step counts often on the CPU."""
        if not isinstance(value, Tensor):
            return value
        group = self.optimizer.param_groups[0]
        stays = name == "step" and not (group.get("capturable") or group.get("fused"))
        return value.clone() if stays else value.to(parameter.device, copy=True)
