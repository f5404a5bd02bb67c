"""An elastic run: start a lighthouse, then this program once per node. Nodes may leave and join.

See docs/tutorials/elastic.md for the commands.
"""

import time

import lightning.pytorch as pl
import torch

from lightning_hiercomm import CommunicationMonitor, Elastic, HierarchicalStrategy, PeriodicAveraging


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, x, batch_idx):
        time.sleep(0.05)  # leaves time to stop a node during training
        inside = (x.norm(dim=1) < 1).float()
        return torch.nn.functional.binary_cross_entropy_with_logits(self.net(x).squeeze(1), inside)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    strategy = HierarchicalStrategy(PeriodicAveraging(sync_every=20), elastic=Elastic(min_nodes=1, dead_after=2))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=2400,
        callbacks=[CommunicationMonitor()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(4096, 2), batch_size=32, shuffle=True))
