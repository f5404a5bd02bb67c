"""Finds tensors of a module whose shape, dtype or device differs between ranks, so that ranks cannot exchange them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_hiercomm.comm.base import Communicator

_MISSING = "missing"
_MOST_NAMES = 20


class _Kind(NamedTuple):
    """The properties of a tensor that must be equal on all ranks to exchange it, and whether it is trained."""

    text: str
    is_trained: bool


def unequal_tensors(
    module: nn.Module,
    group: Communicator,
    device: torch.device,
    known: Collection[str] = (),
    is_trained: Callable[[Tensor], bool] | None = None,
    replaced: Collection[tuple[int, int]] = (),
) -> tuple[dict[str, list[str]], set[tuple[int, int]]]:
    """Find parameters and buffers whose shape, dtype or device type differs between the ranks of a group. Collective.

    Returns:
        By name, what every rank holds; and the positions of buffers that any rank's layers have replaced.

    Raises:
        ValueError: On all ranks, if a parameter that any rank trains is among them.
    """
    trains = is_trained or (lambda parameter: parameter.requires_grad)
    parameters = module.named_parameters(remove_duplicate=False)
    own = {name: _Kind(_text(each), trains(each)) for name, each in parameters if name not in known}
    buffers = module.named_buffers(remove_duplicate=False)
    own |= {name: _Kind(_text(each), False) for name, each in buffers if name not in known}
    compared = own if is_trained is None else {name: kind.text for name, kind in own.items()}
    if are_equal((sorted(compared.items()), sorted(replaced)), group, device):
        return {}, set(replaced)
    gathered = group.all_gather_object((own, list(replaced)))
    everyone: list[dict[str, _Kind]] = [each for each, _ in gathered]
    names = dict.fromkeys(name for each in everyone for name in each)
    held = {name: [each.get(name, _Kind(_MISSING, False)) for each in everyone] for name in names}
    unequal = {name: kinds for name, kinds in held.items() if len({kind.text for kind in kinds}) > 1}
    for name, kinds in (held if is_trained is None else unequal).items():
        if any(kind.is_trained for kind in kinds) and len(set(kinds)) > 1:
            raise ValueError(_error(name, kinds, group.ranks))
    replaced_anywhere = {place for _, places in gathered for place in places}
    return {name: [kind.text for kind in kinds] for name, kinds in unequal.items()}, replaced_anywhere


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


def warning_of_unequal(unequal: dict[str, list[str]], ranks: Sequence[int]) -> str:
    """Return a warning that names tensors that stay each rank's own."""
    each = [f"{name} ({_difference(texts, ranks)})" for name, texts in unequal.items()]
    more = f" and {len(each) - _MOST_NAMES} more" if len(each) > _MOST_NAMES else ""
    return (
        f"these tensors have another shape on other ranks: {', '.join(each[:_MOST_NAMES])}{more}. From now on they stay"
        " each rank's own and are not averaged. A checkpoint holds those of rank 0, and with checkpoint_replicas=True"
        " those of all ranks"
    )


def _text(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "uninitialized"
    kind = "" if tensor.layout == torch.strided else f" {str(tensor.layout).removeprefix('torch.')}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{kind} on {tensor.device.type}"


def _difference(texts: Sequence[str], ranks: Sequence[int]) -> str:
    other = next(place for place, text in enumerate(texts) if text != texts[0])
    one, two = texts[0], texts[other]
    device = " on " + one.rpartition(" on ")[2]
    if one.endswith(device) and two.endswith(device):
        one, two = one.removesuffix(device), two.removesuffix(device)
    return f"{one} on rank {ranks[0]}, {two} on rank {ranks[other]}"


def _error(name: str, kinds: Sequence[_Kind], ranks: Sequence[int]) -> str:
    texts = [kind.text for kind in kinds]
    if len(set(texts)) == 1:
        texts = ["trained" if kind.is_trained else "frozen" for kind in kinds]
    return f"parameter {name}: {_difference(texts, ranks)}. All ranks must train parameters of the same shapes"
