import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsDataModule(pl.LightningDataModule):
    """The 1,797 scans of 8 x 8 pixels that come with scikit-learn, split once and for all into train, val and test.

    Args:
        batch_size: Scans per rank and step.
        split_seed: Which scans go where. Every rank must use the same.
    """

    def __init__(self, batch_size: int = 16, split_seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
        scans = TensorDataset(images, torch.from_numpy(digits.target))
        generator = torch.Generator().manual_seed(self.split_seed)
        # 360 divides by 2, 3 and 4 ranks: no scan is tested twice to fill up the last batch.
        self.train, self.val, self.test = random_split(scans, [1077, 360, 360], generator)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 90)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 90)
