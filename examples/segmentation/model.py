from itertools import pairwise

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torchmetrics.classification import MulticlassJaccardIndex

IGNORED = 255
"""Label of ignored pixels, as in Cityscapes' train ids."""


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015): an encoder and a decoder with skip connections.

    Args:
        num_classes: Channels of the output.
        width: Channels of the first level; each level has twice as many as the one before.
        levels: Number of downsampling steps. Height and width must be multiples of ``2 ** levels``.
    """

    def __init__(self, num_classes: int, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(_block(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(_block(a + b, a) for a, b in pairwise(widths))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips = [self.down[0](images)]
        for block in self.down[1:]:
            skips.append(block(nn.functional.max_pool2d(skips[-1], 2)))
        features = skips.pop()
        for block in reversed(self.up):
            features = block(torch.cat([interpolate(features, scale_factor=2.0), skips.pop()], dim=1))
        return self.head(features)


def _block(channels: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (channels, width):
        layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Segmentation(pl.LightningModule):
    """Train a small U-Net, and log its mean intersection over union.

    Args:
        num_classes: Number of classes; linked to ``data.num_classes``.
        width: Channels of the U-Net's first level.
        levels: Number of downsampling steps of the U-Net.
        lr: Initial learning rate of SGD with momentum; it decays to 0 as ``(1 - step / steps) ** 0.9``.
    """

    def __init__(self, num_classes: int, width: int = 8, levels: int = 3, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = UNet(num_classes, width, levels)
        self.lr = lr
        self.mean_iou = MulticlassJaccardIndex(num_classes, ignore_index=IGNORED)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self(images), labels, ignore_index=IGNORED)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.mean_iou(self(images).argmax(1), labels)
        self.log("mean_iou", self.mean_iou, prog_bar=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=steps, power=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
