"""Which optimizers StepsDelay can serve."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_hiercomm.schemes.optimizer_state import (
    class_names,
    evaluates_loss,
    is_placeholder,
    needs_whole_tensors,
    releases_gradients,
    wraps_another,
)


def check_optimizer(optimizer: Optimizer, parameters: Sequence[Tensor], local_update: str) -> None:
    """Refuse what a sharded server cannot step.

    Raises:
        ValueError: With the reason and the remedy.
    """
    if is_placeholder(optimizer):
        return
    kind = type(optimizer).__name__
    reasons = [
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
            "sparseadam" in class_names(optimizer),
            f"makes sparse gradients dense, which {kind} does not take: use another optimizer, or another scheme",
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
        (
            needs_whole_tensors(optimizer),
            f"cannot serve {kind}, which needs whole tensors, because its server shards them: use another scheme",
        ),
    ]
    for holds, reason in reasons:
        if holds:
            raise ValueError(f"StepsDelay {reason}")
    if local_update == "glu" and not isinstance(optimizer, SGD):
        raise ValueError(
            f"local_update='glu' estimates the global gradient from the steps of momentum SGD, and {kind} steps"
            " differently. Use torch.optim.SGD, or choose local_update='sgd' or 'dc_asgd' with a suitable"
            " local_lr_scale"
        )
