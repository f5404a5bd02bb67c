"""Finds gradients that ranks should have averaged and did not, in the first steps of an optimizer."""

from __future__ import annotations

import warnings
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.dtensor import local
from lightning_hiercomm.nodes.checksums import print_of
from lightning_hiercomm.run.replicas import trained_by

_FIRST_STEPS = 3


class GradientCheck:
    """Compares the gradients of ranks that share them, in the first steps of an optimizer and one step of each epoch.

    It warns if they differ and no reduction has written them. Gradients that a program averages by itself do not
    differ.

    Args:
        module: The module that trains. Ranks share the gradients of its parameters only.
        group: The ranks that share gradients.
        remedy: The last sentence of the warning.
    """

    def __init__(self, module: nn.Module, group: Communicator, remedy: str) -> None:
        self._module = module
        self._group = group
        self._remedy = remedy
        self._left: dict[int, int] = {}
        self._has_warned = False
        self._is_noting = True
        self._reduced: dict[int, tuple[ReferenceType[Tensor], int]] = {}

    def begin_epoch(self) -> None:
        """Compare one more step of each optimizer."""
        self._left = {optimizer: max(1, left) for optimizer, left in self._left.items()}
        self._is_noting = not self._has_warned

    def note_reduction(self) -> None:
        if self._is_noting:
            held = ((id(p), p.grad) for p in self._module.parameters())
            self._reduced = {key: (ref(grad), grad._version) for key, grad in held if grad is not None}

    def after_step(self, optimizer: Optimizer) -> None:
        """Compare gradients after a step, before they are set to zero. Collective in the steps that it compares."""
        left = self._left.get(id(optimizer), _FIRST_STEPS)
        if left == 0 or self._has_warned:
            return
        self._left[id(optimizer)] = left - 1
        self._is_noting = any(self._left.values())
        own = set(map(id, self._module.parameters()))
        held = [(id(p), p.grad) for p in trained_by(optimizer) if id(p) in own]
        if not held:
            return
        is_reduced = all(grad is None or self._was_reduced(key, grad) for key, grad in held)
        print_ = self._print([grad for _, grad in held])
        bounds = torch.stack([print_, ~print_, torch.full_like(print_, not is_reduced)])
        self._group.all_reduce(bounds, op="max").wait()
        most, least, any_unreduced = bounds.tolist()
        if most != ~least and any_unreduced:
            self._has_warned, self._is_noting, self._reduced = True, False, {}
            if self._group.rank == 0:
                warnings.warn(
                    f"{type(optimizer).__name__} stepped with gradients that ranks"
                    f" {', '.join(map(str, self._group.ranks[:8]))} should share, but that were not averaged over them:"
                    f" these ranks now train different models. {self._remedy}",
                    stacklevel=2,
                )

    def _was_reduced(self, key: int, grad: Tensor) -> bool:
        reduced = self._reduced.get(key)
        return reduced is not None and reduced[0]() is grad and reduced[1] == grad._version

    def _print(self, grads: list[Tensor | None]) -> Tensor:
        """Return a checksum of gradients, which counts absent ones as 0."""
        prints = [0 if g is None else print_of(g.coalesce().values() if g.is_sparse else local(g)) for g in grads]
        device = next((local(p).device for p in self._module.parameters()), torch.device("cpu"))
        return print_of(torch.stack([torch.as_tensor(each, dtype=torch.int64, device=device) for each in prints]))
