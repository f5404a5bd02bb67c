import lightning.pytorch as pl
import torch

from lightning_hiercomm import CommunicationMonitor, HierarchicalStrategy


class Model(pl.LightningModule):  # an ordinary LightningModule
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, x, batch_idx):
        inside = (x.norm(dim=1) < 1).float()
        return torch.nn.functional.binary_cross_entropy_with_logits(self.net(x).squeeze(1), inside)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    strategy = HierarchicalStrategy(wire_dtype="int8", ranks_per_node=2)  # four processes act as two nodes
    trainer = pl.Trainer(
        accelerator="cpu", devices=4, strategy=strategy, max_epochs=10, callbacks=[CommunicationMonitor()], logger=False
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(4096, 2), batch_size=32, shuffle=True))
