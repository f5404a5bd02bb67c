"""Average the state of an optimizer over all ranks, encoded as parameters are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_hiercomm.comm.blockwise import Quantized
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.buffers import is_of_numbers
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.nodes.round import Round
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.schemes.optimizer_state import is_elementwise
from lightning_hiercomm.schemes.reducers.sharded import ShardedAllReduce

_LARGEST_DECREASE = 0.5
"""The largest relative decrease of a root in one average: Adam divides by it, and it may round to zero."""

_FIRST_MOMENTS = {"exp_avg", "grad_avg", "momentum_buffer"}
"""Names of torch's optimizers for tensors that have negative elements, although not at every step of a small model."""

_Key = tuple[int, str]
"""The index of a parameter, and the name of a tensor of its state."""


class OptimizerStateMean:
    """Replaces momentum and moments by their weighted mean over all ranks.

    It averages every floating-point tensor of the optimizer's state with the shape of its parameter. A tensor that some
    rank does not have is not averaged: the rank's gradient scaler may have skipped all steps so far, or a parameter had
    no gradient.

    With a lossy codec C, ranks send differences from the last averaged state, with error feedback. The first average of
    a tensor is sent unencoded. Second moments are sent as their square roots, and one average at most halves a root.
    They are the tensors of a name for which no rank has had a negative element, first moments of torch's optimizers
    excepted::

        m := a + mean of C(m_r - a)                                   a: the last averaged m
        v := max(b + mean of C(sqrt(v_r) - b), b / 2) squared         b: the last averaged root of v

    So second moments that were positive stay positive, and Adam never divides by a moment that was rounded to zero.

    Args:
        optimizer: The optimizer whose state is averaged.
        topology: The ranks.
        wire: The encoding of parameters. A codec that delays most elements is replaced by int4, because a node's
            momentum would be reset to an old value until its difference is sent.
    """

    def __init__(self, optimizer: Optimizer, topology: Topology, wire: Wire) -> None:
        self._optimizer = optimizer
        self._topology = topology
        self._wire = Wire(Quantized(4) if wire.codec.needs_feedback else wire.codec)
        self.forget()

    def forget(self) -> None:
        """Drop the last mean, so that the next state is sent unencoded."""
        self._tensors: dict[_Key, Tensor] = {}
        self._roots: dict[_Key, Tensor] = {}  # the tensors that are sent as roots
        self._means: list[ShardedAllReduce] = []  # of the other tensors, and of the roots
        self._signed: set[str] = set()  # the names of tensors that have had a negative element
        self._loaded: Mapping[str, Any] | None = None

    @torch.no_grad()
    def __call__(self, replica: Replica, round_: Round) -> None:
        """Average the state for the parameters that the optimizer trains; blocks. Collective.

        Raises:
            NonfiniteError: On all ranks, if a rank's state is non-finite.
        """
        held = self._held(replica)
        narrowed = [key for key, tensor in held.items() if self._wire.codec.narrows(tensor.dtype)]
        held, narrowed, negative = self._common(held, narrowed)
        if not narrowed:
            self.forget()
            self._average_unencoded(replica, held, round_)
            return
        loaded = self._loaded
        if loaded is not None:
            self._signed = {name for _, name in {*loaded["keys"]} - {*loaded["roots"]}}
        self._signed |= negative
        roots = [(index, name) for index, name in narrowed if name not in self._signed | _FIRST_MOMENTS]
        tensors = {key: held[key] for key in narrowed}
        known = loaded or {"keys": [*self._tensors], "roots": [*self._roots]}
        if (narrowed, roots) != (known["keys"], known["roots"]):
            self._loaded = None
            self._average_unencoded(replica, held, round_)
            self._start(replica, tensors, roots)
            return
        are_replaced = not all(map(is_, tensors.values(), self._tensors.values()))  # by the optimizer
        if loaded or are_replaced:
            states = self.state_dict()["means"]
            self._loaded = None
            self._start(replica, tensors, roots)
            for mean, state in zip(self._means, states, strict=True):
                mean.load_state_dict(state)
        rest = {key: tensor for key, tensor in held.items() if key not in tensors}
        if rest:
            self._average_unencoded(replica, rest, round_)
        mean, mean_of_roots = self._means
        if mean.buckets:
            _checked(mean, round_)
        if mean_of_roots.buckets:
            self._to_roots()
            _checked(mean_of_roots, round_)
            self._to_squares()

    def _held(self, replica: Replica) -> dict[_Key, Tensor]:
        held = {
            (index, name): tensor
            for index, parameter in enumerate(replica.parameters)
            for name, tensor in sorted(self._optimizer.state.get(parameter, {}).items())
            if is_elementwise(tensor, name, parameter) and is_of_numbers(tensor)
        }
        for (_, name), tensor in held.items():
            if is_traceable_wrapper_subclass(tensor):
                raise ValueError(
                    f"average_optimizer_state=True: {type(self._optimizer).__name__} stores {name} as"
                    f" {type(tensor).__name__}, which has no mean: leave average_optimizer_state out"
                )
        return held

    def _common(
        self, held: dict[_Key, Tensor], narrowed: Sequence[_Key]
    ) -> tuple[dict[_Key, Tensor], list[_Key], set[str]]:
        """Return the tensors that all ranks hold, the keys that are encoded, and names with a negative element."""
        world = self._topology.world
        least = [held[key].amin() if held[key].numel() else torch.zeros(()) for key in narrowed]
        numbers = torch.stack([each.float() for each in least]).tolist() if least else []
        negative = sorted({name for (_, name), number in zip(narrowed, numbers, strict=True) if number < 0})
        digest = hashlib.blake2b(repr(list(held)).encode(), digest_size=8).digest()
        everyone: list[tuple[bytes, list[str]]] = world.all_gather_object((digest, negative))
        if len({digest for digest, _ in everyone}) > 1:
            everywhere = set(held).intersection(*world.all_gather_object(list(held)))
            held = {key: tensor for key, tensor in held.items() if key in everywhere}
        return held, [key for key in narrowed if key in held], {name for _, names in everyone for name in names}

    def _average_unencoded(self, replica: Replica, held: Mapping[_Key, Tensor], round_: Round) -> None:
        """Average tensors in their own type."""
        mean = ShardedAllReduce(self._replica_of(replica, held), self._topology)
        _checked(mean, round_)

    def _start(self, replica: Replica, tensors: dict[_Key, Tensor], roots: list[_Key]) -> None:
        """Use the current state, which is equal on all ranks, as the last averaged one."""
        self._tensors, self._roots = tensors, {key: tensors[key] for key in roots}
        others = {key: tensor for key, tensor in tensors.items() if key not in self._roots}
        self._to_roots()
        self._means = [
            ShardedAllReduce(
                self._replica_of(replica, each),
                self._topology,
                self._wire,
                update_reference=update,
            )
            for each, update in ((others, None), (self._roots, _update_root))
        ]
        self._to_squares()

    def _to_roots(self) -> None:
        for tensor in self._roots.values():
            tensor.sqrt_()

    def _to_squares(self) -> None:
        for tensor in self._roots.values():
            tensor.square_()

    def _replica_of(self, replica: Replica, tensors: Mapping[_Key, Tensor]) -> Replica:
        names = [replica.names.get(id(parameter), f"number {n}") for n, parameter in enumerate(replica.parameters)]
        named = [(f"{names[index]} in the optimizer's {name}", tensor) for (index, name), tensor in tensors.items()]
        return Replica(tensors.values(), bucket_bytes=replica.bucket_bytes, named=named)

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the last mean and the error-feedback residuals; empty if there is none."""
        if self._loaded is not None:
            return dict(self._loaded)
        if not self._means:
            return {}
        means = [mean.state_dict() for mean in self._means]
        return {"keys": [*self._tensors], "roots": [*self._roots], "means": means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict` (of a run with the same topology and wire)."""
        self.forget()
        self._loaded = state or None


def _checked(mean: ShardedAllReduce, round_: Round) -> None:
    """Check the state, which the preflight of the parameters has not seen, and average it."""
    mean.begin(round_.step)
    mean(round_)


def _update_root(index: int, root: Tensor, difference: Tensor) -> Tensor:
    return root.copy_(torch.maximum(root + difference, _LARGEST_DECREASE * root))
