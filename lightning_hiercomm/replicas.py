"""Which tensors of a module agree, and under which optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.replica import Replica


class Replicas:
    """A module's trainable parameters and float buffers, cut into one :class:`Replica` per optimizer.

    What an optimizer trains may change in mid-run: callbacks like BackboneFinetuning thaw parameters, or add groups. So
    a replica is made anew each time it is asked for, from what is trainable at that moment.

    Args:
        module: What trains.
        optimizers: The user's own, outside of any wrapper.
        bucket_bytes: Upper bound of a bucket's size in bytes.
        average_buffers: Whether float buffers (BatchNorm statistics) agree together with the parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        bucket_bytes: int = 4 * 2**20,
        average_buffers: bool = True,
    ) -> None:
        self.module = module
        self.optimizers = list(optimizers)
        self.bucket_bytes = bucket_bytes
        self.average_buffers = average_buffers

    @property
    def device(self) -> torch.device:
        """Where the module's parameters live; the CPU if it has none."""
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    def of(self, optimizer: Optimizer) -> Replica:
        """What agrees under an optimizer: its trainable parameters, and the buffers of the layers they belong to."""
        buffers = self._buffers_by_optimizer() if self.average_buffers else {}
        own = next(index for index, other in enumerate(self.optimizers) if other is optimizer)
        named = self.module.named_parameters()
        return Replica(trained_by(optimizer), buffers.get(own, ()), self.bucket_bytes, named)

    def whole(self) -> Replica:
        """The module itself, whatever trains it: all parameters, frozen ones too, and the float buffers that agree."""
        floats = [b for b in self.module.buffers() if b.is_floating_point()] if self.average_buffers else []
        return Replica((), [*self.module.parameters(), *floats], self.bucket_bytes)

    def has_changed(self, replica: Replica, optimizer: Optimizer) -> bool:
        """Whether the optimizer trains other parameters by now than those of ``replica``."""
        trained, known = trained_by(optimizer), replica.parameters
        return len(trained) != len(known) or any(a is not b for a, b in zip(trained, known, strict=True))

    def _buffers_by_optimizer(self) -> dict[int, list[Tensor]]:
        """Float buffers, each under the optimizer that trains the layer it belongs to (else the first)."""
        owner = {id(p): index for index, optimizer in enumerate(self.optimizers) for p in trained_by(optimizer)}
        buffers: dict[int, list[Tensor]] = {}
        for layer in self.module.modules():
            index = next((owner[id(p)] for p in layer.parameters(recurse=False) if id(p) in owner), 0)
            buffers.setdefault(index, []).extend(b for b in layer.buffers(recurse=False) if b.is_floating_point())
        return buffers


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's trainable parameters; which of them have a gradient right now does not matter."""
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel())
    return list(dict.fromkeys(trained))


def broadcast_values(module: nn.Module, world: Communicator) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for bucket in Replica([*module.parameters(), *module.buffers()]).buckets:
        flat = bucket.pack()
        world.broadcast(flat, source=0).wait()
        bucket.unpack(flat)
