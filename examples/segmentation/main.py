"""Train a small U-Net to segment street scenes with DASO, and print the mean IoU of the averaged model.

python examples/segmentation/main.py fit --config examples/segmentation/config.yaml
python examples/segmentation/main.py fit --config examples/segmentation/cityscapes.yaml --data.init_args.root=...
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from model import Segmentation

import lightning_hiercomm  # noqa: F401 - registers the strategy names


class SegmentationCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")

    def after_fit(self) -> None:
        (metrics,) = self.trainer.validate(self.model, self.datamodule, verbose=False)
        if self.trainer.is_global_zero:
            print(f"Mean IoU of the averaged model: {metrics['mean_iou']:.2%}")


if __name__ == "__main__":
    # Ranks may share a machine's cores: one thread each.
    torch.set_num_threads(1)
    SegmentationCLI(
        Segmentation,
        pl.LightningDataModule,
        subclass_mode_data=True,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
    )
