"""Optimizers that the papers compare, each with a learning rate that suits the perceptron."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.simulate.tasks import OptimizerMaker
from benchmarks.tasks import adamw
from benchmarks.zoo import adam


class AdaBelief(Optimizer):
    """Adam whose second moment is that of the gradient's distance from its running mean.

    Source: Zhuang et al. 2020, "AdaBelief Optimizer", Algorithm 2, without its rectification.

    Args:
        parameters: To train.
        lr: The learning rate.
        betas: Of the two running means.
        eps: Added to the second moment, and to its root.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        (first, second), state = group["betas"], self.state[parameter]
        if not state:
            state.update(step=0, mean=torch.zeros_like(parameter), belief=torch.zeros_like(parameter))
        state["step"] += 1
        state["mean"].lerp_(parameter.grad, 1 - first)
        surprise = parameter.grad - state["mean"]
        state["belief"].mul_(second).addcmul_(surprise, surprise, value=1 - second).add_(group["eps"])
        root = (state["belief"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["mean"], root, value=-group["lr"] / (1 - first ** state["step"]))


def sgd(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """Without momentum."""
    return torch.optim.SGD(parameters, rate)


def adabelief(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """The paper's defaults."""
    return AdaBelief(parameters, rate)


def rmsprop(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """torch's defaults."""
    return torch.optim.RMSprop(parameters, rate)


OPTIMIZERS: dict[str, tuple[float, OptimizerMaker]] = {
    "SGD": (1.0, sgd),
    "Adam": (0.01, adam),
    "AdamW": (0.01, adamw),
    "AdaBelief": (0.01, adabelief),
    "RMSprop": (0.01, rmsprop),
}
"""By the papers' names: the highest learning rate for one replica's batches, and what makes it."""
