import lightning.pytorch as pl
import torch
from model import IGNORED
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import Cityscapes
from torchvision.transforms import v2
from torchvision.tv_tensors import Image, Mask

Sample = tuple[Tensor, Tensor]
"""An image, float (3, height, width), and the class of each pixel, int64 (height, width)."""


class DrawnStreets(Dataset[Sample]):
    """Street scenes of sky, road, houses, trees and cars, generated from their index.

    Args:
        first: Index of the first image.
        length: Number of images.
        height: Height in pixels; the width is twice that.
    """

    def __init__(self, first: int, length: int, height: int) -> None:
        self.first, self.length, self.height = first, length, height

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(self.first + index)

        def between(low: float, high: float) -> float:
            return low + (high - low) * torch.rand((), generator=generator).item()

        height, width = self.height, 2 * self.height
        y, x = torch.meshgrid(torch.arange(height) / height, torch.arange(width) / height, indexing="ij")
        horizon = between(0.4, 0.6)
        labels = (y > horizon).long()  # 0 sky, 1 road
        for _ in range(3):
            left, roof = between(-0.2, 1.8), between(0.05, 0.35)
            labels[(x > left) & (x < left + between(0.2, 0.5)) & (y > roof) & (y <= horizon)] = 2  # a house
        for _ in range(2):
            middle, size = between(0.1, 1.9), between(0.08, 0.15)
            labels[(x - middle) ** 2 + (y - horizon + size) ** 2 < size**2] = 3  # a tree
        for _ in range(2):
            left, top = between(0.0, 1.7), between(horizon, 0.8)
            labels[(x > left) & (x < left + 0.3) & (y > top) & (y < top + 0.15)] = 4  # a car
        base = torch.tensor([[0.6, 0.7, 0.9], [0.4, 0.4, 0.4], [0.7, 0.5, 0.4], [0.3, 0.5, 0.3], [0.5, 0.4, 0.5]])
        colors = base + 0.15 * torch.randn(5, 3, generator=generator)
        image = colors[labels].permute(2, 0, 1) + 0.1 * torch.randn(3, height, width, generator=generator)
        return image, labels


class DrawnStreetsDataModule(pl.LightningDataModule):
    """Generated street scenes, which need no download: :class:`DrawnStreets`.

    Args:
        batch_size: Images per rank and step.
        height: Height of the images in pixels; the width is twice that.
        train_length: Number of training images.
        val_length: Number of validation images.
    """

    num_classes = 5

    def __init__(self, batch_size: int = 8, height: int = 32, train_length: int = 512, val_length: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.train = DrawnStreets(0, train_length, height)
        self.val = DrawnStreets(train_length, val_length, height)

    def train_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(self.val, self.batch_size)


class CityscapesDataModule(pl.LightningDataModule):
    """Cityscapes with fine annotations, from https://www.cityscapes-dataset.com/.

    Args:
        root: Folder that contains ``leftImg8bit`` and ``gtFine``.
        batch_size: Crops per rank and step.
        crop: Height and width of the training crops; validation uses whole images.
        num_workers: Worker processes per rank.
    """

    num_classes = 19

    def __init__(
        self, root: str, batch_size: int = 4, crop: tuple[int, int] = (512, 1024), num_workers: int = 4
    ) -> None:
        super().__init__()
        self.root = root
        self.batch_size = batch_size
        self.crop = crop
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        arguments = {"mode": "fine", "target_type": "semantic"}
        augmented = [v2.RandomCrop(self.crop), v2.RandomHorizontalFlip()]
        self.train = Cityscapes(self.root, "train", **arguments, transforms=_ToSample(v2.Compose(augmented)))
        self.val = Cityscapes(self.root, "val", **arguments, transforms=_ToSample(v2.Identity()))

    def train_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Sample]:
        return DataLoader(self.val, 1, num_workers=self.num_workers)


class _ToSample:
    """Crop an image and its labels, and map the labels to train ids 0 to 18, or 255 for ignored classes."""

    def __init__(self, crop: v2.Transform) -> None:
        self.crop = crop
        self.normalize = v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        self.train_ids = torch.full((256,), IGNORED)
        for kind in Cityscapes.classes:
            if kind.id >= 0 and kind.train_id >= 0:
                self.train_ids[kind.id] = kind.train_id

    def __call__(self, image: object, labels: object) -> Sample:
        image, labels = self.crop(Image(image), Mask(labels))
        pixels = v2.functional.to_dtype(image, torch.float32, scale=True)
        return self.normalize(pixels).as_subclass(Tensor), self.train_ids[labels.as_subclass(Tensor)[0].long()]
