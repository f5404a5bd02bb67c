"""accelerate's LocalSGD under torchrun."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD

from benchmarks.job import Recorder


def train(recorder: Recorder, options: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != recorder.world.size:
        raise RuntimeError(f"accelerate sees {accelerator.num_processes} processes of {recorder.world.size}")
    plain = recorder.model()
    model, optimizer = accelerator.prepare(plain, recorder.optimizer(plain))
    period = options["sync_every"]
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=period, enabled=True) as local_sgd:
        last = False
        while not last:
            optimizer.zero_grad()
            accelerator.backward(recorder.loss(model, recorder.next_batch()))
            optimizer.step()
            local_sgd.step()
            last = recorder.step_done()
            if recorder.evaluation_due() and not last:
                recorder.evaluate_mean(plain)
    recorder.finish(plain)
