"""What a user writes: for mypy only, which `make test` runs over this file."""

import lightning.pytorch as pl

from lightning_hiercomm import CommunicationMonitor, HierarchicalStrategy, PeriodicAveraging


def right() -> pl.Trainer:
    strategy = HierarchicalStrategy(PeriodicAveraging(50), ranks_per_node=2)
    return pl.Trainer(strategy=strategy, callbacks=[CommunicationMonitor()])


def wrong_argument() -> None:
    # warn_unused_ignores, which is part of strict, makes this a test that the arguments are seen
    HierarchicalStrategy(PeriodicAveraging(50), ranks_per_node="two")  # type: ignore[arg-type]
