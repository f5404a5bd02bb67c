"""Train on a Ray cluster, one worker per GPU or CPU: `python examples/ray_train.py 8 /shared/runs`.

A node of Ray is a node of the strategy. When a worker dies, Ray starts all of them again from the last checkpoint.
"""

import contextlib
import sys

import ray.train
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer

from lightning_hiercomm import PeriodicAveraging
from lightning_hiercomm.trainer.ray import RayHierarchicalStrategy


def train() -> None:
    """Run on every worker."""
    trainer = Trainer(
        strategy=RayHierarchicalStrategy(PeriodicAveraging(16)),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        devices="auto",
        max_epochs=4,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with contextlib.ExitStack() as stack:
        given = ray.train.get_checkpoint()  # after a failure
        path = None if given is None else f"{stack.enter_context(given.as_directory())}/checkpoint.ckpt"
        prepare_trainer(trainer).fit(BoringModel(), ckpt_path=path)


if __name__ == "__main__":
    workers, storage = int(sys.argv[1]), sys.argv[2]
    TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=3)),
    ).fit()
