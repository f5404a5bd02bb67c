"""StepsDelay over real processes, in a Trainer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from harness import TARGETS as FOUR
from lightning.pytorch.strategies import DDPStrategy
from problems import STEPS_DELAY_TABLE as TABLE
from problems import Oracle, SaveAfterEpoch
from torch.utils.data import DataLoader

from lightning_hiercomm.schemes import StepsDelay


class Delayed(Oracle):
    """``report`` is x after each batch, and as validation saw it."""

    def __init__(self, targets: Sequence[float], steps: int = 7) -> None:
        super().__init__(steps, targets=targets, learning_rate=0.01, momentum=0.9)
        self.report = ([], [])

    def on_train_batch_end(self, *_: object) -> None:
        self.report[0].append(self.x.item())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.report[1].append(self.x.item())

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(self.trainer.world_size, 1))


pytestmark = pytest.mark.pooled
TWO = (1.0, 7.0)
DOUBLE = {"precision": "64-true", "num_sanity_val_steps": 0}


def test_processes_follow_the_table_and_validate_on_server_weights(fit):
    strategy = {"scheme": StepsDelay(2, warmup_steps=2), "ranks_per_node": 2}
    reports = fit(Delayed(FOUR), strategy, val_check_interval=1, **DOUBLE)
    for rank, report in enumerate(reports):
        trace, seen = report["report"]
        assert trace == pytest.approx([row[rank // 2] for row in TABLE], abs=1e-9)
        assert seen == pytest.approx([row[2] for row in TABLE], abs=1e-9)
        assert report["state_dict"]["x"].item() == pytest.approx(TABLE[-1][2], abs=1e-9)


def test_checkpoint_resumes_under_ddp_and_on_other_nodes(fit, tmp_path):
    path = tmp_path / "delay.ckpt"

    scheme = StepsDelay(2, warmup_steps=2)
    without = {"limit_val_batches": 0, **DOUBLE}
    fit(Delayed(FOUR, steps=6), {"scheme": scheme}, callbacks=[SaveAfterEpoch(path)], **without)
    saved = torch.load(path, weights_only=True)
    weight, momentum = TABLE[5][2], -100 * 0.1697867918
    assert saved["state_dict"]["x"].item() == pytest.approx(weight, abs=1e-9)
    assert saved["optimizer_states"][0]["state"][0]["momentum_buffer"].tolist() == pytest.approx([momentum], abs=1e-7)

    resume = {"fit_arguments": {"ckpt_path": path}, "max_epochs": 2, **without}
    ddp = fit(Delayed(TWO, steps=1), DDPStrategy(), devices=2, **resume)
    moved = weight - 0.01 * (0.9 * momentum + weight - 4)
    assert ddp[0]["report"][0] == pytest.approx([moved], abs=1e-7)  # Lightning loads weights as float32

    others = fit(Delayed((4.0, 1.0, 7.0), steps=1), {"scheme": scheme, "ranks_per_node": 1}, devices=3, **resume)
    assert others[0]["state_dict"]["x"].item() == pytest.approx(moved, abs=1e-7)
    # the exchange starts over: nothing has been pulled yet, so the first local step has no global gradient
    for report, target in zip(others, (4.0, 1.0, 7.0), strict=True):
        assert report["report"][0] == pytest.approx([weight - 0.04 * 2 * (weight - target)], abs=1e-7)
