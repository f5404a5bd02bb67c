"""What a user writes with either of Lightning's packages: for mypy only, which `make test` runs over this file."""

import lightning.pytorch
import pytorch_lightning

import lightning_hiercomm
import lightning_hiercomm.pytorch_lightning
from lightning_hiercomm import PeriodicAveraging


def first() -> lightning.pytorch.Trainer:
    strategy = lightning_hiercomm.HierarchicalStrategy(PeriodicAveraging(50), ranks_per_node=2)
    return lightning.pytorch.Trainer(strategy=strategy, callbacks=[lightning_hiercomm.CommunicationMonitor()])


def second() -> pytorch_lightning.Trainer:
    strategy = lightning_hiercomm.pytorch_lightning.HierarchicalStrategy(PeriodicAveraging(50), ranks_per_node=2)
    monitor = lightning_hiercomm.pytorch_lightning.CommunicationMonitor(summary=False)
    return pytorch_lightning.Trainer(strategy=strategy, callbacks=[monitor])


def wrong_argument() -> None:
    # warn_unused_ignores, which is part of strict, makes this a test that the arguments are seen
    lightning_hiercomm.pytorch_lightning.HierarchicalStrategy(PeriodicAveraging(50), ranks_per_node="two")  # type: ignore[arg-type]
