"""Which optimizers StepsDelay can serve."""

from __future__ import annotations

from functools import partial

from torch.optim import SGD

from lightning_hiercomm.schemes.context import Context
from lightning_hiercomm.schemes.optimizer_state import (
    evaluates_loss,
    is_placeholder,
    optimizer_like,
    releases_gradients,
    wraps_another,
)
from lightning_hiercomm.schemes.optimizer_trial import why_not_in_parts, why_not_without_gradient


def check_served(context: Context, local_update: str) -> None:
    """Check that a sharded server can train the replica.

    Raises:
        ValueError: If it cannot, with the remedy.
    """
    optimizer, held = context.optimizer, set(map(id, context.replica.parameters))
    kind = type(optimizer).__name__
    if not context.wire.codec.adds:
        raise ValueError(
            "StepsDelay sends gradients and weights as they are or cast: leave wire_dtype out, or use 'bfloat16'"
        )
    if is_placeholder(optimizer):
        return
    of_groups = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(p.requires_grad and p.numel() and id(p) not in held for p in of_groups):
        raise ValueError(
            "StepsDelay steps all parameters on its server, also those that the module tells DDP to leave to each rank"
            " (_ddp_params_and_buffers_to_ignore): use another scheme"
        )
    if evaluates_loss(optimizer):
        raise ValueError(
            f"StepsDelay cannot serve {kind}, which evaluates the loss several times per step: use another scheme"
        )
    if wraps_another(optimizer):
        raise ValueError(
            f"StepsDelay cannot serve {kind}, which wraps another optimizer, because every shard has an optimizer of"
            " the same class: use the wrapped optimizer itself, or another scheme"
        )
    if releases_gradients(optimizer):
        raise ValueError(
            f"StepsDelay cannot serve {kind} with gradient_release, which steps inside the backward pass, before the"
            " node's mean gradient is known: make it without gradient_release"
        )
    if len({parameter.data_ptr() for parameter in context.replica.parameters}) < len(held):
        raise ValueError(
            "StepsDelay cannot serve parameters that share memory (`a.data = b.data`), because its server holds each of"
            " them: tie the parameter itself (`a = b`)"
        )
    if any("lr" not in group for group in optimizer.param_groups):
        raise ValueError(
            f"StepsDelay reads the learning rate from param_groups[...]['lr'], which {kind} lacks: use another scheme"
        )
    for index, group in enumerate(optimizer.param_groups):
        devices = [parameter.device for parameter in group["params"] if id(parameter) in held]
        make = partial(optimizer_like, optimizer, index)
        for why_not in (why_not_in_parts, why_not_without_gradient) if devices else ():
            if reason := why_not(make, devices[0]):
                raise ValueError(
                    f"StepsDelay cannot serve {kind}, because every rank steps another flat shard of the tensors:"
                    f" {reason}. Use AllReduce(), or another scheme"
                )
    if local_update == "glu" and not isinstance(optimizer, SGD):
        raise ValueError(
            f"local_update='glu' estimates the global gradient from the steps of momentum SGD, and {kind} steps"
            " differently. Use torch.optim.SGD, or choose local_update='sgd' or 'dc_asgd' with a suitable"
            " local_lr_scale"
        )
