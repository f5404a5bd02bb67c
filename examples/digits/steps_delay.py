"""Does StepsDelay keep the accuracy of synchronous SGD? One table, on two nodes of two ranks, all on this CPU.

python examples/digits/steps_delay.py                 # five seeds: forty runs of a few seconds
python examples/digits/steps_delay.py --seeds 1
"""

import argparse

import lightning.pytorch as pl
import torch
from data import DigitsDataModule
from model import DigitsCNN
from study import Progress, be_quiet, mean_and_spread, train_and_test

from lightning_hiercomm import AllReduce, HierarchicalStrategy, StepsDelay
from lightning_hiercomm.schemes import Scheme

WARMUP_STEPS = 60  # a multiple of every delay
LOCAL_LR_SCALE = {"glu": 4.0, "dc_asgd": 1.0, "sgd": 0.25}  # the paper's, Section 4.4


class DigitsSGD(DigitsCNN):
    """The digits CNN, trained by momentum SGD, for which GLU is made; the learning rate falls to 0 along a cosine."""

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def accuracy(scheme: Scheme, seed: int, epochs: int, lr: float) -> float:
    """Train; percent of the 720 held-out digits that the agreed model gets right."""
    pl.seed_everything(seed)
    strategy = HierarchicalStrategy(scheme, ranks_per_node=2, start_method="fork")
    share, _ = train_and_test(DigitsSGD(lr=lr), DigitsDataModule(), strategy, ranks=4, epochs=epochs, all_held_out=True)
    return 100 * share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=0.05)
    arguments = parser.parse_args()
    be_quiet()

    progress = Progress(8 * arguments.seeds)

    def row(title: str, scheme: Scheme) -> None:
        found = []
        for seed in range(arguments.seeds):
            progress(f"{title}, seed {seed}")
            found.append(accuracy(scheme, seed, arguments.epochs, arguments.lr))
        mean, spread = mean_and_spread(found)
        each = ", ".join(f"{value:.2f}" for value in found)
        print(f"| {title} | {mean} | {spread} | {each} |", flush=True)

    def steps_delay(delay: int, rule: str) -> Scheme:
        return StepsDelay(delay, WARMUP_STEPS, local_lr_scale=LOCAL_LR_SCALE[rule], local_update=rule)

    print(
        f"lr {arguments.lr} (cosine), momentum 0.9, {WARMUP_STEPS} warm-up steps, {arguments.epochs} epochs of 16 steps"
    )
    print("| scheme | held-out accuracy, % | between seeds | each seed |\n|---|---|---|---|")
    row("all-reduce", AllReduce())
    for delay in range(1, 6):
        row(f"GLU, k = {delay}, local lr {4 * arguments.lr:g}", steps_delay(delay, "glu"))
    for rule, title in (("dc_asgd", "DC-ASGD-a"), ("sgd", "local SGD")):
        row(f"{title}, k = 5, local lr {LOCAL_LR_SCALE[rule] * arguments.lr:g}", steps_delay(5, rule))


if __name__ == "__main__":
    main()
