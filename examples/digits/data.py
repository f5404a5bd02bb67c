import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsDataModule(pl.LightningDataModule):
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, with a fixed split into train, val and test.

    Args:
        batch_size: Images per rank and step.
        split_seed: Seed of the split. All ranks must use the same.
    """

    def __init__(self, batch_size: int = 16, split_seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
        dataset = TensorDataset(images, torch.from_numpy(digits.target))
        generator = torch.Generator().manual_seed(self.split_seed)
        # 360 is divisible by 2, 3 and 4 ranks: DistributedSampler then adds no duplicates.
        self.train, self.val, self.test = random_split(dataset, [1077, 360, 360], generator)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 90)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 90)
