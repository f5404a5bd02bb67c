"""A whole ``Trainer.fit`` of many small steps on one node, with each scheme and with Lightning's DDPStrategy.

One process; ``python -m benchmarks one-node`` does the same with several. The time is of all ``STEPS`` steps.
"""

from __future__ import annotations

import lightning as L
import pytest
from lightning.pytorch.strategies import DDPStrategy, Strategy
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.workloads import WORKLOADS, Batch, loss_of
from lightning_hiercomm import HierarchicalStrategy, schemes

STEPS = 300
WORKLOAD = WORKLOADS["mlp85k"]


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = WORKLOAD.model()

    def training_step(self, batch: Batch, _: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> Optimizer:
        return WORKLOAD.optimizer(self.model)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name", ["ddp", *schemes.SCHEMES])
def test_fit(benchmark: BenchmarkFixture, name: str) -> None:
    stream = WORKLOAD.batches(0, 1, 0)
    batches = [next(stream) for _ in range(STEPS)]

    def trainer() -> tuple[tuple[L.Trainer, Module], dict[str, object]]:
        strategy: Strategy = DDPStrategy()
        if name != "ddp":
            strategy = HierarchicalStrategy(scheme=schemes.SCHEMES[name]())
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            strategy=strategy,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        return (trainer, Module()), {}

    def fit(trainer: L.Trainer, module: Module) -> None:
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]

    benchmark.pedantic(fit, setup=trainer, rounds=7, warmup_rounds=1)
