"""Trains a small CNN on scikit-learn's handwritten digits, then tests the model that the nodes agreed on.

python examples/digits/main.py fit --config examples/digits/config.yaml
python examples/digits/main.py fit --config examples/digits/config.yaml --config examples/digits/all_reduce.yaml
"""

import torch
from data import DigitsDataModule
from lightning.pytorch.cli import LightningCLI
from model import DigitsCNN

import lightning_hiercomm  # noqa: F401 - registers the strategy names


class DigitsCLI(LightningCLI):
    def after_fit(self) -> None:
        (metrics,) = self.trainer.test(self.model, self.datamodule, verbose=False)
        if self.trainer.is_global_zero:
            print(f"Test accuracy of the agreed model: {metrics['test_accuracy']:.2%}")


if __name__ == "__main__":
    # Four ranks share this machine's cores; more threads than cores only slow them down.
    torch.set_num_threads(1)
    DigitsCLI(DigitsCNN, DigitsDataModule, seed_everything_default=0, save_config_kwargs={"overwrite": True})
