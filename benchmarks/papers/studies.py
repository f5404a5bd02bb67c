"""All studies, by the numbers of their papers."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.papers.crossover import STUDY as crossover
from benchmarks.papers.daso import STUDY as daso
from benchmarks.papers.hetgrad import STUDY as hetgrad
from benchmarks.papers.node_averaging import STUDY as node_averaging
from benchmarks.papers.steps_delay import STUDY as steps_delay
from benchmarks.papers.study import Study
from benchmarks.papers.tasks import STUDY as tasks

STUDIES: dict[str, Study] = {
    study.number: study for study in (tasks, node_averaging, steps_delay, daso, crossover, hetgrad)
}


def play(number: str, key: str, seed: int) -> dict[str, Any]:
    """One seed of one setting; in whichever process."""
    torch.set_num_threads(1)  # other processes train at the same time
    return STUDIES[number].by_key[key].run(seed)
