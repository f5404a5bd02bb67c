from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


def text_of_python() -> bytes:
    """The language reference that comes with Python, as its own help() shows it: some 700 kB of English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class Text(pl.LightningDataModule):
    """A text cut into pieces; every twentieth is held out.

    Args:
        batch_size: Pieces per rank and step.
        context: Bytes of a piece.
        path: A file to read in place of the text that comes with Python.
    """

    def __init__(self, batch_size: int = 16, context: int = 64, path: str | None = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.context = context
        self.path = path

    def setup(self, stage: str) -> None:
        text = Path(self.path).read_bytes() if self.path else text_of_python()
        pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, self.context + 1, self.context)
        held_out = torch.arange(len(pieces)) % 20 == 19
        self.train, self.val = _dataset(pieces[~held_out]), _dataset(pieces[held_out])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, drop_last=True)


def _dataset(pieces: Tensor) -> TensorDataset:
    return TensorDataset(pieces.long())
