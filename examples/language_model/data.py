from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


def text_of_python() -> bytes:
    """Return Python's language reference, about 700 kB of English from the topics of `help()`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


class Text(pl.LightningDataModule):
    """A text as a sequence of bytes, cut into sequences of equal length; every twentieth is held out.

    Args:
        batch_size: Sequences per rank and step.
        context: Length of a sequence, in bytes.
        path: A text file. Default: Python's language reference.
    """

    def __init__(self, batch_size: int = 16, context: int = 64, path: str | None = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.context = context
        self.path = path

    def setup(self, stage: str) -> None:
        text = Path(self.path).read_bytes() if self.path else text_of_python()
        sequences = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, self.context + 1, self.context)
        held_out = torch.arange(len(sequences)) % 20 == 19
        self.train = TensorDataset(sequences[~held_out].long())
        self.val = TensorDataset(sequences[held_out].long())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, drop_last=True)
