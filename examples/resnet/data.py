from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import CIFAR10, CIFAR100, MNIST, ImageFolder
from torchvision.transforms import v2

SMALL = {
    "cifar10": (CIFAR10, [0.491, 0.482, 0.447], [0.247, 0.243, 0.262]),
    "cifar100": (CIFAR100, [0.507, 0.487, 0.441], [0.267, 0.256, 0.276]),
    "mnist": (MNIST, [0.131] * 3, [0.308] * 3),
}
"""Small data sets of torchvision, with mean and standard deviation of the channels."""


class ColouredDigits(Dataset[tuple[Tensor, int]]):
    """scikit-learn's handwritten digits as 32 x 32 RGB images of random colors and offsets, seeded by their index.

    Args:
        held_out: Whether to return the held-out fifth instead of the training images.
    """

    def __init__(self, held_out: bool) -> None:
        digits = load_digits()
        chosen = (torch.arange(len(digits.target)) % 5 == 4) == held_out
        images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)[chosen]
        self.digits = torch.nn.functional.interpolate(images, scale_factor=3.0, mode="bilinear")
        self.classes = torch.from_numpy(digits.target)[chosen].tolist()

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        background, foreground = torch.rand(2, 3, 1, 1, generator=generator).mul(0.8)
        background, foreground = -1 + background, 1 - foreground
        top, left = torch.randint(2, 7, (2,), generator=generator).tolist()
        image = background.expand(3, 32, 32).clone()
        image[:, top : top + 24, left : left + 24].lerp_(foreground, self.digits[index].expand(3, 24, 24))
        return image + 0.1 * torch.randn(3, 32, 32, generator=generator), self.classes[index]


class ImageDataModule(pl.LightningDataModule):
    """Images for classification.

    Args:
        dataset: ``"coloured_digits"`` needs no download. torchvision must have downloaded ``"cifar10"``,
            ``"cifar100"`` or ``"mnist"`` to ``root``. ``"imagenet"`` is the folders ``train`` and ``val`` in ``root``,
            each with a folder per class.
        root: Folder of the data set; the same path on every node.
        batch_size: Images per rank and step.
        size: Height and width of the images. Default: those of the data set; 224 for ``"imagenet"``.
        num_workers: Worker processes per rank.

    Raises:
        ValueError: If ``root`` is missing and ``dataset`` needs it.
    """

    def __init__(
        self,
        dataset: Literal["coloured_digits", "cifar10", "cifar100", "mnist", "imagenet"] = "coloured_digits",
        root: str | None = None,
        batch_size: int = 16,
        size: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if root is None and dataset != "coloured_digits":
            raise ValueError(f"dataset={dataset!r} needs root=..., the folder of the data set")
        self.dataset = dataset
        self.root = Path(root or ".")
        self.batch_size = batch_size
        self.size = size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        if self.dataset == "coloured_digits":
            self.train, self.val = ColouredDigits(held_out=False), ColouredDigits(held_out=True)
        elif self.dataset in SMALL:
            kind, mean, std = SMALL[self.dataset]
            resized = [v2.Resize(self.size)] if self.size else []
            plain = [*resized, v2.RGB(), *to_tensor, v2.Normalize(mean, std)]
            flipped = [v2.RandomHorizontalFlip()] if kind is not MNIST else []
            augmented = [v2.RandomCrop(28 if kind is MNIST else 32, padding=4), *flipped, *plain]
            self.train = kind(self.root, train=True, transform=v2.Compose(augmented))
            self.val = kind(self.root, train=False, transform=v2.Compose(plain))
        else:
            size = self.size or 224
            plain = [*to_tensor, v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
            augmented = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *plain])
            centre = v2.Compose([v2.Resize(size * 256 // 224), v2.CenterCrop(size), *plain])
            self.train = ImageFolder(self.root / "train", augmented)
            self.val = ImageFolder(self.root / "val", centre)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val)

    def _loader(self, dataset: Dataset, **arguments: bool) -> DataLoader:
        workers = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        return DataLoader(dataset, self.batch_size, pin_memory=torch.cuda.is_available(), **workers, **arguments)
