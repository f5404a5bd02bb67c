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
    values_of,
    wraps_another,
)
from lightning_hiercomm.schemes.optimizer_trial import why_not_in_parts, why_not_without_gradient


def check_optimizer(optimizer: Optimizer, parameters: Sequence[Tensor], local_update: str) -> None:
    """Refuse what a sharded server cannot step.

    Raises:
        ValueError: With the reason and the remedy.
    """
    if is_placeholder(optimizer):
        return
    kind, held = type(optimizer).__name__, set(map(id, parameters))
    of_groups = (parameter for group in optimizer.param_groups for parameter in group["params"])
    reasons = [
        (
            any(p.requires_grad and p.numel() and id(p) not in held for p in of_groups),
            "steps all parameters on its server, also those that the module tells DDP to leave to each rank"
            " (_ddp_params_and_buffers_to_ignore): use another scheme",
        ),
        (
            evaluates_loss(optimizer),
            f"cannot serve {kind}, which evaluates the loss several times per step: use another scheme",
        ),
        (
            wraps_another(optimizer),
            f"cannot serve {kind}, which wraps another optimizer, because every shard has an optimizer of the same"
            f" class: use the wrapped optimizer itself, or another scheme",
        ),
        (
            releases_gradients(optimizer),
            f"cannot serve {kind} with gradient_release, which steps inside the backward pass, before the node's mean"
            " gradient is known: make it without gradient_release",
        ),
        (
            len({parameter.data_ptr() for parameter in parameters}) < len(parameters),
            "cannot serve parameters that share memory (`a.data = b.data`), because its server holds each of them: tie"
            " the parameter itself (`a = b`)",
        ),
        (
            any("lr" not in group for group in optimizer.param_groups),
            f"reads the learning rate from param_groups[...]['lr'], which {kind} lacks: use another scheme",
        ),
    ]
    for holds, reason in reasons:
        if holds:
            raise ValueError(f"StepsDelay {reason}")
    for found in _found_by_trial(optimizer, parameters):
        raise ValueError(
            f"StepsDelay cannot serve {kind}, because every rank steps another flat shard of the tensors: {found}. Use"
            " AllReduce(), or another scheme"
        )
    if local_update == "glu" and not isinstance(optimizer, SGD):
        raise ValueError(
            f"local_update='glu' estimates the global gradient from the steps of momentum SGD, and {kind} steps"
            " differently. Use torch.optim.SGD, or choose local_update='sgd' or 'dc_asgd' with a suitable"
            " local_lr_scale"
        )


def _found_by_trial(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Iterator[str]:
    """Yield reasons why optimizers like the param groups of another cannot step shards."""
    trained, tried = set(map(id, parameters)), set()
    for index, group in enumerate(optimizer.param_groups):
        devices = [local(parameter).device for parameter in group["params"] if id(parameter) in trained]
        kind = repr({name: value for name, value in values_of(group).items() if name != "lr"})
        if not devices or kind in tried:
            continue
        tried.add(kind)

        def make(tensors: list[Parameter], index: int = index) -> Optimizer:
            own = optimizer_like(optimizer, index)
            own.param_groups[0]["params"] = tensors
            return own

        for why_not in (why_not_in_parts, why_not_without_gradient):
            if reason := why_not(make, devices[0]):
                yield reason
