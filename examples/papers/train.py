"""Train models of torchvision with the hyper-parameters of a paper. Each configuration is one experiment.

python examples/papers/train.py fit --config examples/papers/002.yaml --data.root=/data/imagenet  # on every node
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR
from torchvision.models import get_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "resnet"))  # shares the data and the base class
from data import ImageDataModule
from main import ResNetCLI
from model import ImageClassifier, small_resnet


class PaperClassifier(ImageClassifier):
    """A model of torchvision with a configurable optimizer, warm-up and schedule.

    Args:
        architecture: A model of torchvision, such as ``"resnet50"`` or ``"vit_b_16"``; or ``"resnet20"`` for CIFAR.
        num_classes: Number of classes.
        weights: Pre-trained weights, such as ``"DEFAULT"``. The last layer is new, and all layers are trained.
        small_pictures: Whether the first layers keep the resolution, for images of 32 x 32 pixels.
        optimizer: Builds the optimizer from the parameters.
        schedule: Builds a schedule that counts epochs. Default: a constant learning rate.
        schedule_after: Epochs before the schedule starts.
        pictures_per_lr: Number of images per step over all ranks that the learning rate is for (Goyal et al. 2017). It
            is scaled to the actual number. Default: no scaling.
        warmup_epochs: Epochs in which the learning rate rises at every step.
        label_smoothing: Label smoothing of the cross entropy.
        batch_size: Images per rank and batch; linked to ``data.batch_size``.
    """

    def __init__(
        self,
        architecture: str = "resnet18",
        num_classes: int = 10,
        weights: str | None = None,
        small_pictures: bool = False,
        optimizer: OptimizerCallable = torch.optim.SGD,
        schedule: LRSchedulerCallable | None = None,
        schedule_after: int = 0,
        pictures_per_lr: int | None = None,
        warmup_epochs: float = 0.0,
        label_smoothing: float = 0.0,
        batch_size: int = 16,
    ) -> None:
        super().__init__(make_net(architecture, num_classes, weights, small_pictures), num_classes, label_smoothing)
        self.optimizer = optimizer
        self.schedule = schedule
        self.schedule_after = schedule_after
        self.pictures_per_lr = pictures_per_lr
        self.warmup_epochs = warmup_epochs
        self.batch_size = batch_size

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        # ReduceLROnPlateau monitors it; ranks need the same value to keep the same learning rate
        self.log("epoch_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> tuple[list, list]:
        trainer = self.trainer
        optimizer = self.optimizer(self.parameters())
        if self.pictures_per_lr is not None:
            images = self.batch_size * trainer.world_size * trainer.accumulate_grad_batches
            for group in optimizer.param_groups:
                group["lr"] *= images / self.pictures_per_lr
        schedules = []  # each multiplies the current learning rate
        if self.schedule is not None:
            schedule = self.schedule(optimizer)
            if self.schedule_after:
                constant = ConstantLR(optimizer, 1.0, total_iters=self.schedule_after)
                schedule = SequentialLR(optimizer, [constant, schedule], [self.schedule_after])
            monitored = {"monitor": schedule.monitor} if isinstance(schedule, ReduceLROnPlateau) else {}
            schedules.append({"scheduler": schedule, "interval": "epoch", **monitored})
        steps_per_epoch = int(trainer.estimated_stepping_batches) / max(1, trainer.max_epochs or 1)
        if warmup := round(self.warmup_epochs * steps_per_epoch):
            rising = LinearLR(optimizer, 1 / warmup, total_iters=warmup)
            schedules.append({"scheduler": rising, "interval": "step"})
        return [optimizer], schedules


def make_net(architecture: str, num_classes: int, weights: str | None, small_pictures: bool) -> nn.Module:
    """Build the model with ``num_classes`` outputs."""
    if architecture == "resnet20":
        return small_resnet(16, [3, 3, 3], num_classes)  # He et al. 2016, section 4.2
    if weights is None:
        net = get_model(architecture, num_classes=num_classes)
    else:
        net = get_model(architecture, weights=weights)
        replace(net, nn.Linear, -1, lambda last: nn.Linear(last.in_features, num_classes))
    if small_pictures:
        replace(net, nn.Conv2d, 0, lambda first: nn.Conv2d(3, first.out_channels, 3, padding=1, bias=False))
        replace(net, nn.MaxPool2d, 0, lambda pooling: nn.Identity())
    return net


def replace(net: nn.Module, kind: type[nn.Module], index: int, make: Callable[[Any], nn.Module]) -> None:
    """Replace the ``index``-th layer of type ``kind``."""
    path, layer = [(path, layer) for path, layer in net.named_modules() if isinstance(layer, kind)][index]
    parent, _, name = path.rpartition(".")
    setattr(net.get_submodule(parent), name, make(layer))


if __name__ == "__main__":
    ResNetCLI(PaperClassifier, ImageDataModule, seed_everything_default=0, save_config_kwargs={"overwrite": True})
