"""What the papers say about time, in their own symbols: the special cases that predictions must reproduce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def all_reduce_seconds(replicas: int, elements: float, alpha: float, beta: float) -> dict[str, float]:
    """Table I of paper 000: seconds of an all-reduce by method, without reductions.

    The table prints ``2 R ((R - 1) / R) beta`` for the dense method, which would not depend on the size of the model;
    its source (Ok-Topk) has the number of elements there.

    Args:
        replicas: R.
        elements: Of the model.
        alpha: Seconds of latency per message.
        beta: Seconds to transmit one element.
    """
    sent = 2 * (replicas - 1) / replicas * elements * beta
    return {"dense": 2 * math.log2(replicas) * alpha + sent, "ring": 2 * (replicas - 1) * alpha + sent}


@dataclass(frozen=True)
class Layer:
    """One layer in an iteration of paper 001; seconds.

    Attributes:
        backward: h_b, its backward pass.
        push: h_s, sending its gradient.
        rest: h_r + h_sync + h_up: pulling its weights, waiting for others, the server's update.
        local: h_loc, its local update.
    """

    backward: float
    push: float
    rest: float
    local: float = 0.0

    @property
    def communication(self) -> float:
        """h_c, Eq. 3."""
        return self.push + self.rest


@dataclass(frozen=True)
class Iteration:
    """Training as paper 001 models it: layers 1 to L, whose gradients come in the order L to 1.

    Gradients of :class:`~lightning_hiercomm.schemes.StepsDelay` leave together when the backward pass has ended, so
    for it a model is one layer; then :func:`~lightning_hiercomm.planning.predict.cost.predict` gives Eq. 4. For
    synchronous training it gives Eq. 2, DDP's buckets being the layers.

    Source: Xu et al., "SSD-SGD", Sections 2.1 to 2.3.

    Attributes:
        forward: T_f, seconds.
        layers: From the first to the last.
    """

    forward: float
    layers: Sequence[Layer]

    @property
    def backward(self) -> float:
        """T_b."""
        return sum(layer.backward for layer in self.layers)

    @property
    def communication(self) -> float:
        """T_c."""
        return sum(layer.communication for layer in self.layers)

    @property
    def push(self) -> float:
        """The sum of h_s."""
        return sum(layer.push for layer in self.layers)

    @property
    def synchronous_seconds(self) -> float:
        """Eq. 2: T_iter of synchronous SGD."""
        first, last = self.layers[0], self.layers[-1]
        hides = sum(layer.backward for layer in self.layers[:-1])
        hidden = sum(layer.communication for layer in self.layers[1:])
        if hides > hidden:
            return self.forward + self.backward + first.communication
        return self.forward + self.communication + last.backward

    def delayed_case(self) -> int:
        """Which case of Eq. 4 this is.

        1: pushes hide behind computation, the pull does not. 2: not even pushes do. 3: everything does; the paper says
        so in words, below the equation.
        """
        alone = self.forward + self.backward + self.layers[0].local
        if self.push >= alone:
            return 2
        return 1 if self.communication + self.layers[-1].backward > alone + self.backward else 3

    def delayed_seconds(self, delay: int) -> float:
        """Eq. 4: T_avg,k of SSD-SGD.

        Args:
            delay: k, iterations between two pulls.
        """
        alone = self.forward + self.backward + self.layers[0].local
        case = self.delayed_case()
        if case == 3:
            return alone
        ends = self.communication + self.layers[-1].backward
        if case == 1:
            return alone + (ends - alone - self.backward) / delay
        return self.push + (ends - self.backward - self.push) / delay
