"""Trains a ResNet on coloured digits, on two nodes of two CPU ranks; the same program trains CIFAR-10 and ImageNet.

python examples/resnet/main.py fit --config examples/resnet/config.yaml
python examples/resnet/main.py fit --config examples/resnet/imagenet.yaml --data.root=...  # on every node, by torchrun
"""

import torch
from data import Pictures
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from model import Classifier

import lightning_hiercomm  # noqa: F401 - registers the strategy names


class ResNetCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.batch_size", "model.batch_size")

    def after_fit(self) -> None:
        if self.trainer.is_global_zero:
            accuracy = self.trainer.callback_metrics["val_accuracy"]
            print(f"Accuracy of the agreed model on held-out pictures: {accuracy:.2%}")


if __name__ == "__main__":
    # Ranks that share a machine's cores: more threads than cores only slow them down.
    torch.set_num_threads(1)
    ResNetCLI(Classifier, Pictures, seed_everything_default=0, save_config_kwargs={"overwrite": True})
