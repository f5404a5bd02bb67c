"""Local rules, by which a node uses its own gradients between two pulls: GLU, SGD, delay compensation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

_DECAY, _STRENGTH = 0.95, 2.0  # of the mean square, and lambda_0


@dataclass
class LocalUpdate:
    """The argument of a local rule, which changes :attr:`weights` in place.

    All tensors are 1-D, of one length, dtype and device, and hold some parameters of one param group.

    Attributes:
        weights: w'. The device's weights or, if a pull has arrived since the last iteration, the server's.
        gradient: The node's mean gradient g.
        taken_at: The weights at which g was taken: w' itself, unless a pull has arrived.
        pulled: pre, the server's weights from the last pull but the one that has just arrived, if one has.
        mean_square: The running mean of g * g, which ``dc_asgd`` updates; empty for other rules.
        learning_rate: The server's, from the param group, as are momentum, dampening (of a momentum only) and weight
            decay; 0 if it has none.
        local_learning_rate: ``local_lr_scale`` times that.
        delay: k; alpha and beta are GLU's, too.
    """

    weights: Tensor
    gradient: Tensor
    taken_at: Tensor
    pulled: Tensor
    mean_square: Tensor
    learning_rate: float
    local_learning_rate: float
    momentum: float
    dampening: float
    weight_decay: float
    delay: int
    alpha: float
    beta: float


def glu(update: LocalUpdate) -> None:
    """Global gradient for local update: estimate the global gradient from the server's change between two pulls.

    With a constant gradient a server with momentum m ends up moving by ``lr / (1 - m)`` times the gradient per step,
    so::

        grad_sync = (pre - w') * (1 - m) / (lr * k)
        w'       := w' - loc_lr * (alpha * g + wd * w' + beta * grad_sync)

    Source: SSD-SGD, Section 3.2.1, Eq. 8 and Algorithm 2. The paper prints "+ loc_lr"; its momentum rule, and sense,
    require minus. Dampening d makes the server's steps (1 - d) times as long, which grad_sync undoes.
    """
    if update.learning_rate == 0:  # a schedule's first or last step: the local learning rate is 0, too
        return
    weights, local_learning_rate = update.weights, update.local_learning_rate
    direction, share = update.gradient, update.alpha
    if update.weight_decay:
        direction, share = direction.mul(share).add_(weights, alpha=update.weight_decay), 1.0
    # the factor from the server's change between two pulls to a gradient
    scale = (1 - update.momentum) / ((1 - update.dampening) * update.learning_rate * update.delay)
    # w' - loc_lr * beta * grad_sync in one pass, without a copy: w' moves away from pre
    weights.lerp_(update.pulled, -local_learning_rate * update.beta * scale)
    weights.sub_(direction, alpha=local_learning_rate * share)


def sgd(update: LocalUpdate) -> None:
    """Plain local SGD, ``w' := w' - loc_lr * (g + wd * w')``: the paper's first comparison (Section 4.4)."""
    direction = update.gradient
    if update.weight_decay:
        direction = direction.add(update.weights, alpha=update.weight_decay)
    update.weights.sub_(direction, alpha=update.local_learning_rate)


def dc_asgd(update: LocalUpdate) -> None:
    """Local SGD with the delay compensation of DC-ASGD-a, the paper's second comparison (Section 4.4).

    A gradient taken at weights v but used at w' is corrected by a diagonal estimate of the Hessian::

        mean_square := 0.95 mean_square + 0.05 g * g
        lambda       = 2 / sqrt(mean_square + 1e-7)
        w'          := w' - loc_lr * (g + lambda * g * g * (w' - v) + wd * w')

    w' and v differ when a pull has just arrived; otherwise this is :func:`sgd`.

    Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017, Eq. 10 and 14,
    with its constants for CIFAR-10. There the server compensates; here the node does, as in the SSD-SGD paper.
    """
    gradient, mean_square = update.gradient, update.mean_square
    mean_square.mul_(_DECAY).addcmul_(gradient, gradient, value=1 - _DECAY)
    trust = _STRENGTH * (mean_square + 1e-7).rsqrt_()
    direction = (update.weights - update.taken_at).mul_(gradient).mul_(gradient).mul_(trust)
    direction.add_(gradient).add_(update.weights, alpha=update.weight_decay)
    update.weights.sub_(direction, alpha=update.local_learning_rate)


LOCAL_RULES: dict[str, Callable[[LocalUpdate], None]] = {"glu": glu, "sgd": sgd, "dc_asgd": dc_asgd}
