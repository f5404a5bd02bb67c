import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torchmetrics.classification import MulticlassAccuracy
from torchvision.models import get_model


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, features: Tensor) -> Tensor:
        return relu(self.layers(features) + self.shortcut(features))


def small_resnet(width: int, blocks: list[int], num_classes: int) -> nn.Module:
    """Return a ResNet for 32 x 32 images (He et al. 2016); ``width=64, blocks=[2, 2, 2, 2]`` is ResNet-18."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage, count in enumerate(blocks):
        for index in range(count):
            outputs = width * 2**stage
            layers.append(Block(channels, outputs, stride=2 if stage and not index else 1))
            channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


class ImageClassifier(pl.LightningModule):
    """Train and validate an image classifier. Subclasses configure the optimizer.

    Args:
        net: Maps images to scores of shape (batch, classes).
        num_classes: Number of classes.
        label_smoothing: Label smoothing of the cross entropy.
    """

    def __init__(self, net: nn.Module, num_classes: int, label_smoothing: float) -> None:
        super().__init__()
        self.net = net
        self.label_smoothing = label_smoothing
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, classes = batch
        loss = cross_entropy(self(images), classes, label_smoothing=self.label_smoothing)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, classes = batch
        self.val_accuracy(self(images), classes)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)


class Classifier(ImageClassifier):
    """A ResNet, or a model of torchvision, with the large-batch recipe of Goyal et al. 2017.

    Args:
        num_classes: Number of classes.
        width: Channels of the small ResNet's first stage; each stage has twice as many as the one before.
        blocks: Blocks per stage of the small ResNet.
        architecture: A model of torchvision, such as ``resnet50``. Default: the small ResNet.
        base_lr: Learning rate for 256 images per step over all ranks. It is scaled to the actual number.
        weight_decay: Weight decay of parameters of more than one dimension.
        warmup_epochs: Epochs in which the learning rate rises, before a cosine decay.
        label_smoothing: Label smoothing of the cross entropy.
        batch_size: Images per rank and step; linked to ``data.batch_size``.
    """

    def __init__(
        self,
        num_classes: int = 10,
        width: int = 8,
        blocks: list[int] = [1, 1, 1],  # noqa: B006 - the command line cannot set a tuple
        architecture: str | None = None,
        base_lr: float = 0.4,
        weight_decay: float = 5e-4,
        warmup_epochs: float = 1.0,
        label_smoothing: float = 0.1,
        batch_size: int = 16,
    ) -> None:
        net = (
            small_resnet(width, blocks, num_classes)
            if architecture is None
            else get_model(architecture, num_classes=num_classes)
        )
        super().__init__(net, num_classes, label_smoothing)
        self.save_hyperparameters()

    def configure_optimizers(self) -> dict:
        hparams, trainer = self.hparams, self.trainer
        lr = hparams["base_lr"] * hparams["batch_size"] * trainer.world_size * trainer.accumulate_grad_batches / 256
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": hparams["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)
        steps = int(trainer.estimated_stepping_batches)
        warmup = max(1, int(steps * hparams["warmup_epochs"] / max(1, trainer.max_epochs or 1)))
        schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warmup)),
            ],
            [warmup],
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
