"""Train a small CNN on scikit-learn's handwritten digits, then test the averaged model.

python examples/digits/main.py fit --config examples/digits/config.yaml
python examples/digits/main.py fit --config examples/digits/config.yaml --config examples/digits/all_reduce.yaml
"""

import logging
import warnings

import torch
from data import DigitsDataModule
from lightning.pytorch.cli import LightningCLI
from model import DigitsCNN

import lightning_hiercomm  # noqa: F401 - registers the strategy names


class DigitsCLI(LightningCLI):
    def after_fit(self) -> None:
        for package in ("lightning.pytorch", "lightning.fabric"):  # test would repeat what fit logged
            logging.getLogger(package).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="lightning")
        if self.trainer.progress_bar_callback is not None:
            self.trainer.progress_bar_callback.disable()
        (metrics,) = self.trainer.test(self.model, self.datamodule, verbose=False)
        if self.trainer.is_global_zero:
            accuracy, loss = metrics["test_accuracy"], metrics["test_loss"]
            print(f"Test accuracy of the averaged model: {accuracy:.2%} (cross entropy {loss:.4f})")
            print(
                "On one machine the table above counts what is saved in bytes; benchmarks/README.md measures the time."
            )


if __name__ == "__main__":
    # The ranks share this machine's cores: one thread each.
    torch.set_num_threads(1)
    DigitsCLI(DigitsCNN, DigitsDataModule, seed_everything_default=0, save_config_kwargs={"overwrite": True})
