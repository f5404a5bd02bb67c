from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_hiercomm.schemes import Context, Every, ParameterSync, RunningParameterSync
from lightning_hiercomm.schemes.plateau import Plateau


class AtPlateau(ParameterSync):
    """Average parameters over all ranks after every epoch whose loss is not ``threshold`` below the best so far."""

    watches_loss = True

    def __init__(self, threshold: float = 0.05) -> None:
        super().__init__(schedule=Every(None))
        self.threshold = threshold

    def build(self, context: Context) -> RunningParameterSync:
        return RunningAtPlateau(self, context)


class RunningAtPlateau(RunningParameterSync[AtPlateau]):
    def __init__(self, config: AtPlateau, context: Context) -> None:
        super().__init__(config, context)
        self.plateau = Plateau(config.threshold, patience=0)

    def end_epoch(self, loss: Tensor | None) -> None:
        if loss is None:
            raise ValueError("AtPlateau needs a training_step that returns the loss")
        mean = loss.clone()
        self.topology.world.all_reduce(mean, weight=self.topology.rank_weight).wait()
        if self.plateau.reached(mean.item()):
            self.average()

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "best": self.plateau.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.plateau.best = state["best"]
