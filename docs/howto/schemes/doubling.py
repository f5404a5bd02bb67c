from collections.abc import Sequence

from lightning_hiercomm.schemes import Schedule


class Doubling(Schedule):
    """All fragments after steps 1, 2, 4, 8 and so on."""

    def due(self, step: int, step_in_epoch: int, fragments: int) -> Sequence[int]:
        return range(fragments) if step & (step - 1) == 0 else ()

    def longest_staleness(self, fragments: int) -> int:
        return 0  # steps 1 and 2 follow each other, so no exchange may take longer than a step
