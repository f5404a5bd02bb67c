"""Periodic averaging whose period grows as the learning rate decays."""

from lightning_hiercomm.schemes import ParameterSync


class QuadraticAveraging(ParameterSync):
    """Gu et al. 2024, "A Quadratic Synchronization Rule": rounds of max(H, floor((growth / learning rate)^2)) steps."""

    def __init__(self, sync_every: int = 4, growth: float = 0.0175, warmup_steps: int = 0) -> None:
        super().__init__(schedule=sync_every)
        self.sync_every, self.growth, self.warmup_steps = sync_every, growth, warmup_steps

    def next_period(self, state, optimizer):
        rate = float(optimizer.param_groups[0]["lr"])
        grows = state.steps >= self.warmup_steps and rate > 0.0
        return max(self.sync_every, int((self.growth / rate) ** 2) if grows else 0)
