"""Hang on purpose: rank 0 calls a collective that the other ranks do not call."""

import lightning.pytorch as pl
import torch

from lightning_hiercomm import Health, HierarchicalStrategy


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).pow(2).mean()
        if self.global_rank == 0 and batch_idx == 4:
            self.all_gather(loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    strategy = HierarchicalStrategy("periodic", ranks_per_node=2, health=Health(hang_timeout=20))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(4096, 2), batch_size=32))
