"""Train a small language model on Python's language reference, with DiLoCo between nodes.

python examples/language_model/main.py fit --config examples/language_model/config.yaml \
    --config examples/language_model/fsdp2.yaml

With ddp.yaml instead of fsdp2.yaml every rank holds the whole model.
"""

import torch
from data import Text
from lightning.pytorch.cli import LightningCLI
from model import LanguageModel

import lightning_hiercomm  # noqa: F401 - registers the strategy names


class LanguageModelCLI(LightningCLI):
    def after_fit(self) -> None:
        if self.trainer.is_global_zero:
            bits = self.trainer.callback_metrics["val_bits_per_byte"]
            print(f"The averaged model needs {bits:.2f} bits per byte of held-out text")


if __name__ == "__main__":
    # The ranks share this machine's cores: one thread each.
    torch.set_num_threads(1)
    LanguageModelCLI(LanguageModel, Text, seed_everything_default=0, save_config_kwargs={"overwrite": True})
