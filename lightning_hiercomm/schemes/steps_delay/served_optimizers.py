"""Which optimizers StepsDelay can serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from lightning_hiercomm.comm.dtensor import local
from lightning_hiercomm.schemes.optimizer_state import (
    evaluates_loss,
    is_placeholder,
    optimizer_like,
    releases_gradients,
    wraps_another,
)
from lightning_hiercomm.schemes.optimizer_trial import why_not_in_parts, why_not_without_gradient


def why_not_served(optimizer: Optimizer, parameters: Sequence[Tensor], local_update: str) -> Iterator[str]:
    """Yield reasons why a sharded server cannot step an optimizer, with the remedy."""
    if is_placeholder(optimizer):
        return
    kind, held = type(optimizer).__name__, set(map(id, parameters))
    of_groups = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(p.requires_grad and p.numel() and id(p) not in held for p in of_groups):
        yield (
            "StepsDelay steps all parameters on its server, also those that the module tells DDP to leave to each rank"
            " (_ddp_params_and_buffers_to_ignore): use another scheme"
        )
    if evaluates_loss(optimizer):
        yield (f"StepsDelay cannot serve {kind}, which evaluates the loss several times per step: use another scheme")
    if wraps_another(optimizer):
        yield (
            f"StepsDelay cannot serve {kind}, which wraps another optimizer, because every shard has an optimizer of"
            " the same class: use the wrapped optimizer itself, or another scheme"
        )
    if releases_gradients(optimizer):
        yield (
            f"StepsDelay cannot serve {kind} with gradient_release, which steps inside the backward pass, before the"
            " node's mean gradient is known: make it without gradient_release"
        )
    if len({parameter.data_ptr() for parameter in parameters}) < len(parameters):
        yield (
            "StepsDelay cannot serve parameters that share memory (`a.data = b.data`), because its server holds each of"
            " them: tie the parameter itself (`a = b`)"
        )
    if any("lr" not in group for group in optimizer.param_groups):
        yield (
            f"StepsDelay reads the learning rate from param_groups[...]['lr'], which {kind} lacks: use another scheme"
        )
    for found in _found_by_trial(optimizer, held):
        yield (
            f"StepsDelay cannot serve {kind}, because every rank steps another flat shard of the tensors: {found}. Use"
            " AllReduce(), or another scheme"
        )
    if local_update == "glu" and not isinstance(optimizer, SGD):
        yield (
            f"local_update='glu' estimates the global gradient from the steps of momentum SGD, and {kind} steps"
            " differently. Use torch.optim.SGD, or choose local_update='sgd' or 'dc_asgd' with a suitable"
            " local_lr_scale"
        )


def _found_by_trial(optimizer: Optimizer, trained: set[int]) -> Iterator[str]:
    """Yield reasons why optimizers like the param groups of another cannot step shards."""
    for index, group in enumerate(optimizer.param_groups):
        devices = [local(parameter).device for parameter in group["params"] if id(parameter) in trained]

        def make(tensors: list[Parameter], index: int = index) -> Optimizer:
            own = optimizer_like(optimizer, index)
            own.param_groups[0]["params"] = tensors
            return own

        for why_not in (why_not_in_parts, why_not_without_gradient) if devices else ():
            if reason := why_not(make, devices[0]):
                yield reason
