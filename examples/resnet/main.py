"""Train a ResNet on colored digits, CIFAR-10 or ImageNet.

python examples/resnet/main.py fit --config examples/resnet/config.yaml
python examples/resnet/main.py fit --config examples/resnet/imagenet.yaml --data.root=...  # by torchrun, on every node
"""

import torch
from data import ImageDataModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from model import Classifier

import lightning_hiercomm  # noqa: F401 - registers the strategy names


class ResNetCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.batch_size", "model.batch_size")

    def after_fit(self) -> None:
        if self.trainer.is_global_zero:
            accuracy = self.trainer.callback_metrics["val_accuracy"]
            print(f"Accuracy of the averaged model on held-out images: {accuracy:.2%}")


if __name__ == "__main__":
    # Ranks may share a machine's cores: one thread each.
    torch.set_num_threads(1)
    ResNetCLI(Classifier, ImageDataModule, seed_everything_default=0, save_config_kwargs={"overwrite": True})
