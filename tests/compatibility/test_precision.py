"""Number types."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from problems import Net, Quadratic, report_of, same_bits


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        pytest.param("bf16-mixed", torch.float32, marks=pytest.mark.feature("bf16-mixed")),
        pytest.param("bf16-true", torch.bfloat16, marks=pytest.mark.feature("bf16-true")),
        pytest.param("64-true", torch.float64, marks=pytest.mark.feature("64-true")),
    ],
)
def test_precision(follows_one_device, precision, dtype):
    arguments = {"precision": precision, "use_distributed_sampler": False, "rtol": 1e-4, "atol": 1e-5}
    if precision == "bf16-true":
        arguments |= {"rtol": 0.02, "atol": 0.02}
    ours, one = follows_one_device(Net, **arguments)
    assert {value.dtype for value in ours[0]["state_dict"].values()} == {dtype}
    assert not torch.allclose(one["state_dict"]["layers.0.bias"].float(), Net().layers[0].bias, atol=0.05)


class Overflowing(Quadratic):
    """Rank 1's loss overflows in the second batch. Reports which batches stepped, and the scale after each."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        return loss * float("inf") if batch_idx == 1 and self.global_rank == 1 else loss

    def on_train_batch_start(self, *_):
        self.before = self.head.bias.item()

    def on_train_batch_end(self, *_):
        scheme = self.trainer.strategy.schemes[0]
        scale = self.trainer.precision_plugin.scaler.get_scale()
        self.report = [*(self.report or []), (scheme.state.steps, self.head.bias.item() != self.before, scale)]


@pytest.mark.feature("16-mixed, one rank overflows")
def test_a_gradient_scaler_skips_a_step(on_ranks, scheme, scheme_name):
    def main(trainer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        trainer = trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        trainer.fit(Overflowing())
        return report_of(trainer)

    reports = on_ranks(main)
    same_bits(reports)
    for report in reports:
        assert all(value.isfinite().all() for value in report["state_dict"].values())
        assert [steps for steps, _, _ in report["report"]] == list(range(1, 9))
    skipping = 4 if scheme.gradients == "world" else 2
    scales = [report["report"][-1][2] for report in reports]
    assert scales == [1024.0 / 4] * skipping + [1024.0] * (4 - skipping)
    if scheme_name in ("all_reduce", "periodic"):  # others move parameters in a step that is skipped, too
        assert [report["report"][1][1] for report in reports] == [rank >= skipping for rank in range(4)]
