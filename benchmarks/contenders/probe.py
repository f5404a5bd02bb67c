"""Not a contender: what `python -m lightning_hiercomm probe` measures, in the same session as the rows it predicts."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.contenders.lightning import Batches, Module
from benchmarks.job import Recorder
from lightning_hiercomm.planning.measure.probe import probe
from lightning_hiercomm.planning.measure.ranks import connected
from lightning_hiercomm.planning.measure.steps import time_steps


def train(recorder: Recorder, options: dict[str, Any]) -> None:
    module, data = Module(recorder), DataLoader(Batches(recorder), batch_size=None)
    with connected(recorder.world.local_size) as ranks:
        profile = probe(ranks, partial(time_steps, module, data, ranks.device, options["seconds"]), lambda _: None)
    recorder.record.profile = profile.to_dict()
