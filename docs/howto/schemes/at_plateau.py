from dataclasses import dataclass, field

from torch import Tensor

from lightning_hiercomm.schemes import Context, Every, ParameterSync, Plateau, RunningParameterSync, SyncState
from lightning_hiercomm.schemes.plateau import PlateauDetector


class AtPlateau(ParameterSync):
    """Average parameters over all ranks after every epoch whose loss is not ``threshold`` below the best so far."""

    watches_loss = True

    def __init__(self, threshold: float = 0.05) -> None:
        super().__init__(schedule=Every(None))
        self.threshold = threshold

    def build(self, context: Context) -> RunningParameterSync:
        return RunningAtPlateau(self, context)


@dataclass
class PlateauState(SyncState):
    plateau: PlateauDetector = field(default_factory=PlateauDetector)


class RunningAtPlateau(RunningParameterSync[AtPlateau]):
    state: PlateauState

    def _new_state(self) -> PlateauState:
        return PlateauState(plateau=PlateauDetector(Plateau(patience=0, threshold=self.config.threshold)))

    def end_epoch(self, loss: Tensor | None) -> None:
        if loss is None:
            raise ValueError("AtPlateau needs a training_step that returns the loss")
        mean = loss.clone()
        self.topology.world.all_reduce(mean, weight=self.topology.rank_weight).wait()
        if self.state.plateau.reached(mean.item()):
            self.average()
