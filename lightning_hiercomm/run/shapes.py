"""Compares the shapes of a module's tensors between ranks, because an exchange of unequal sizes ends a process."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.nodes.buffers import LEAVE_OUT
from lightning_hiercomm.nodes.ignored import ignored_by_ddp


class _Kind(NamedTuple):
    """The properties of a tensor that must be equal on all ranks to exchange it, and how it is used."""

    text: str
    is_averaged: bool = False
    is_trained: bool = False


def check_shapes(
    module: nn.Module,
    group: Communicator,
    device: torch.device,
    averaged: Collection[str],
    before_training: bool = False,
) -> set[str]:
    """Check that shapes, dtypes and device types of parameters and averaged buffers are equal on all ranks. Collective.

    Those that DDP ignores are not compared.

    Args:
        module: The module.
        group: The ranks.
        device: Of the numbers that are exchanged.
        averaged: The names of buffers that are averaged.
        before_training: Whether to compare other buffers, too, and which parameters are trained.

    Returns:
        The names of other buffers that differ: they stay each rank's own.

    Raises:
        ValueError: On all ranks, if a parameter or an averaged buffer differs.
    """
    ignored = ignored_by_ddp(module)
    named = [each for each in module.named_parameters(remove_duplicate=False) if each[0] not in ignored]
    parameters = {name: _Kind(_text(p), is_trained=before_training and p.requires_grad) for name, p in named}
    named_buffers = [each for each in module.named_buffers(remove_duplicate=False) if each[0] not in ignored]
    buffers = {name: _Kind(_text(b), name in averaged) for name, b in named_buffers}
    own = parameters | {name: kind for name, kind in buffers.items() if before_training or kind.is_averaged}
    if are_equal(sorted(own.items()), group, device):
        return set()
    everyone: list[tuple[dict[str, _Kind], set[str]]] = group.all_gather_object((own, set(parameters)))
    are_parameters = set[str]().union(*(names for _, names in everyone))
    unequal = set()
    for name in dict.fromkeys(name for held, _ in everyone for name in held):
        kinds = [held.get(name, _Kind("missing")) for held, _ in everyone]
        if len(set(kinds)) == 1:
            continue
        if name in are_parameters:
            raise ValueError(
                f"parameter {name}: {_difference(kinds, group.ranks)}. All ranks must have parameters of the same"
                " shapes, and train the same ones. Register a tensor that no optimizer trains as a buffer"
            )
        if any(kind.is_averaged for kind in kinds):
            raise ValueError(f"buffer {name}: {_difference(kinds, group.ranks)}, so that it has no mean. {LEAVE_OUT}")
        unequal.add(name)
    return unequal


def are_equal(value: Any, group: Communicator, device: torch.device) -> bool:
    """Return whether the ``repr`` of a value is the same on all ranks of a group. Collective: 16 bytes."""
    if group.size == 1:
        return True
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    own = int.from_bytes(digest, "little", signed=True)
    bounds = torch.tensor([own, ~own], device=device)  # ~ reverses the order and never overflows
    group.all_reduce(bounds, op="max").wait()
    most, least = bounds.tolist()
    return bool(most == ~least)


def _text(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "uninitialized"
    kind = "" if tensor.layout == torch.strided else f" {str(tensor.layout).removeprefix('torch.')}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{kind} on {tensor.device.type}"


def _difference(kinds: Sequence[_Kind], ranks: Sequence[int]) -> str:
    texts = [kind.text for kind in kinds]
    if len(set(texts)) == 1:
        texts = ["trained" if kind.is_trained else "frozen" for kind in kinds]
    other = next(place for place, text in enumerate(texts) if text != texts[0])
    one, two = texts[0], texts[other]
    device = " on " + one.rpartition(" on ")[2]
    if one.endswith(device) and two.endswith(device):
        one, two = one.removesuffix(device), two.removesuffix(device)
    return f"{one} on rank {ranks[0]}, {two} on rank {ranks[other]}"
