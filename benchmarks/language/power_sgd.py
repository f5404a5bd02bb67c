"""PowerSGD as PyTorch has it, for nodes that are threads: the same hook, over a communicator of this package."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from lightning_hiercomm.comm.base import Communicator, Handle, finished
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.gradient_path import Contents, GradientPath

_MEMORIES = ("iter", "error_dict", "p_memory_dict", "q_memory_dict")
_one_at_a_time = threading.Lock()
"""Held where the hook seeds torch's random number generator, which all threads share."""


class PowerSGD(GradientPath):
    """Averages gradients with ``powerSGD_hook``, as ``DistributedDataParallel`` does with one bucket.

    Args:
        topology: Nodes of one rank each.
        module: Its gradients are those of all parameters, in their order.
        rank: Of the thin matrices.
        first_step: With compression; PyTorch advises a start without it.
    """

    level = "inter"

    def __init__(self, topology: Topology, module: nn.Module, rank: int, first_step: int) -> None:
        group = topology.duplicate().inter
        assert group is not None
        self._group = _Group(group)
        self._shapes = [parameter.shape for parameter in module.parameters()]
        self._state = PowerSGDState(
            self._group,  # type: ignore[arg-type]
            matrix_approximation_rank=rank,
            start_powerSGD_iter=first_step,
        )

    def reduce(self, bucket: Tensor, index: int = 0, contents: Contents = ()) -> Handle:
        with _one_at_a_time:
            self._group.defers = True
            result = powerSGD_hook(self._state, _Bucket(bucket, self._shapes))  # type: ignore[arg-type]
            self._group.defers = False
        self._group.complete()
        averaged = result.wait()
        if averaged is not bucket:
            bucket.copy_(averaged)
        return finished

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._state, name) for name in _MEMORIES}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _MEMORIES:
            setattr(self._state, name, state[name])


class _Bucket:
    """The methods of ``GradBucket`` that the hook calls."""

    def __init__(self, flat: Tensor, shapes: Sequence[torch.Size]) -> None:
        self._flat, self._shapes = flat, shapes

    def buffer(self) -> Tensor:
        return self._flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[Tensor]:
        parts = self._flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class _Group:
    """The methods of ``ProcessGroup`` that ``torch.distributed.all_reduce`` and the hook call.

    Attributes:
        defers: Whether a collective is completed by :meth:`complete` instead of at once.
    """

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self.defers = False
        self._pending: list[tuple[Handle, _Work, Tensor]] = []

    def size(self) -> int:
        return self._group.size

    def allreduce(self, tensors: Sequence[Tensor], options: object) -> _Work:
        (tensor,) = tensors
        work = _Work()
        self._pending.append((self._group.all_reduce(tensor), work, tensor))
        if not self.defers:
            self.complete()
        return work

    def complete(self) -> None:
        pending, self._pending = self._pending, []
        for handle, work, tensor in pending:
            handle.wait()
            work.future.set_result([tensor])


class _Work:
    def __init__(self) -> None:
        self.future: Future[list[Tensor]] = Future()

    def get_future(self) -> Future[list[Tensor]]:
        return self.future
