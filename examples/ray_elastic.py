"""Train on a Ray cluster whose workers may die: `python examples/ray_elastic.py 8 /shared/runs`.

Every worker is a node of the strategy. When one dies, the others train on, and Ray starts it again.
"""

import sys

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer

from lightning_hiercomm import Elastic, PeriodicAveraging
from lightning_hiercomm.trainer.ray import RayHierarchicalStrategy
from lightning_hiercomm.trainer.ray_elastic import ElasticTorchConfig

ELASTIC = Elastic(min_nodes=2)


def train(config: dict[str, str]) -> None:
    """Run on every worker."""
    trainer = Trainer(
        strategy=RayHierarchicalStrategy(PeriodicAveraging(16), elastic=ELASTIC),
        plugins=[RayLightningEnvironment()],
        callbacks=[ModelCheckpoint(f"{config['storage']}/checkpoints", save_last=True)],
        devices=1,
        max_epochs=4,
        enable_progress_bar=False,
    )
    prepare_trainer(trainer).fit(BoringModel(), ckpt_path="last")  # used if all workers were lost


if __name__ == "__main__":
    workers, storage = int(sys.argv[1]), sys.argv[2]
    TorchTrainer(
        train,
        train_loop_config={"storage": storage},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        torch_config=ElasticTorchConfig(ELASTIC),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=100)),
    ).fit()
