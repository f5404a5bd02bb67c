"""Periodic averaging whose period grows as the learning rate decays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_hiercomm.schemes.base import Context
from lightning_hiercomm.schemes.components.schedules import Schedule
from lightning_hiercomm.schemes.parameter_sync import ParameterSync, RunningParameterSync


@dataclass(frozen=True)
class Round(Schedule):
    """All parts, once: ``period`` steps after step ``begun``."""

    begun: int
    period: int

    def due(self, step: int, step_in_epoch: int, parts: int) -> Sequence[int]:
        return range(parts) if step == self.begun + self.period else ()

    def longest_staleness(self, parts: int) -> int:
        return 0


class QuadraticAveraging(ParameterSync):
    """Average parameters over all ranks after rounds of ``max(sync_every, floor((growth / learning rate)^2))`` steps.

    Source: Gu et al. 2024, "A Quadratic Synchronization Rule for Distributed Deep Learning".

    Args:
        sync_every: H, the length of the shortest round, and of every round that begins during warm-up.
        growth: The paper's alpha; 0.0175 for AdamW on ViT-B.
        warmup_steps: Steps in which the learning rate still rises.

    Raises:
        ValueError: If ``sync_every`` is not positive.
    """

    def __init__(self, sync_every: int = 4, growth: float = 0.0175, warmup_steps: int = 0) -> None:
        if sync_every < 1:
            raise ValueError(f"sync_every={sync_every} must be a positive number of steps")
        super().__init__(schedule=Round(0, sync_every))
        self.sync_every, self.growth, self.warmup_steps = sync_every, growth, warmup_steps

    def build(self, context: Context) -> RunningQuadratic:
        return RunningQuadratic(self, context)


class RunningQuadratic(RunningParameterSync[QuadraticAveraging]):
    """Rounds whose end is known when they begin."""

    def before_step(self, last: bool) -> None:
        config, rate = self.config, float(self.required_optimizer.param_groups[0]["lr"])
        if self.steps in (0, self.schedule.begun + self.schedule.period):
            grows = self.steps >= config.warmup_steps and rate > 0.0
            self.schedule = Round(self.steps, max(config.sync_every, int((config.growth / rate) ** 2) if grows else 0))

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "round": [self.schedule.begun, self.schedule.period]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.schedule = Round(*state["round"])
