"""The weights that a node pulled from the server, and the state of its local rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.schemes.steps_delay.groups import UserGroups
from lightning_hiercomm.schemes.steps_delay.server import ShardedServer


class PulledWeights:
    """The state of one node between two pulls.

    Args:
        server: The server; nothing is in flight.
        groups: The user's param groups, whose changes the server follows.

    Attributes:
        server: As above.
        groups: As above.
        delayed_steps: Steps since the end of warm-up, u.
        has_pulled: Whether the next iteration uses weights that were pulled.
        pulled: The weights pulled last, pre: one flat tensor per bucket of the server.
        parts: Cache-sized parts of each bucket, to which the local rule is applied.
        rule_state: The local rule's tensors, for each of these parts.
    """

    def __init__(self, server: ShardedServer, groups: UserGroups) -> None:
        self.server = server
        self.groups = groups
        self.restart()

    def restart(self) -> None:
        """Continue from the parameters' values, which are equal on all ranks."""
        self.delayed_steps = 0
        self.has_pulled = False
        self.pulled = [bucket.pack() for bucket in self.server.buckets]
        self.parts = [bucket.bucket.in_cache_sized() for bucket in self.server.buckets]
        self.rule_state: list[list[dict[str, Tensor]]] = [[{} for _ in parts] for parts in self.parts]
        self.server.restart(self.pulled)

    def replace(self, index: int, weights: Tensor) -> None:
        """Replace the pulled weights of a bucket."""
        self.server.spares.give_back(self.pulled[index])
        self.pulled[index] = weights

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, the server's included; nothing is in flight."""
        return {
            "delayed_steps": self.delayed_steps,
            "has_pulled": self.has_pulled,
            "pulled": [tensor.clone() for tensor in self.pulled],
            "rule": [_joined(states) for states in self.rule_state],
            "server": self.server.state_dict(),
            "groups": self.groups.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, of a run with the same topology, buckets and wire."""
        self.delayed_steps = state["delayed_steps"]
        self.has_pulled = state["has_pulled"]
        for tensor, values in zip(self.pulled, state["pulled"], strict=True):
            tensor.copy_(values)
        self.rule_state = [_cut(whole, parts) for whole, parts in zip(state["rule"], self.parts, strict=True)]
        self.server.load_state_dict(state["server"])
        self.groups.load_state_dict(state["groups"])


def _joined(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a copy of a rule's state for a whole bucket, so that checkpoints do not depend on its parts."""
    tensors = {name: [state[name] for state in states] for name in states[0]} if states else {}
    return {name: torch.cat(parts) for name, parts in tensors.items()}


def _cut(whole: Mapping[str, Tensor], parts: Sequence[Bucket]) -> list[dict[str, Tensor]]:
    lengths = [part.numel for part in parts]
    tensors = {name: values.split(lengths) for name, values in whole.items()}
    return [
        {name: values[place].to(part.device, copy=True) for name, values in tensors.items()}
        for place, part in enumerate(parts)
    ]
