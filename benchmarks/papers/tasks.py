"""Can the tasks tell methods apart? One replica, growing batches: how much is lost, and how much is chance."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks.papers.perceptron import EXAMPLES, PERCEPTRON
from benchmarks.papers.pictures import legend, lines, panels, save
from benchmarks.papers.report import table
from benchmarks.papers.study import Results, Setting, Study
from benchmarks.predict.cluster import Cluster, Link, Workload
from benchmarks.simulate.simulation import Experiment, Site
from benchmarks.zoo import TASKS
from lightning_hiercomm.schemes import AllReduce

BATCHES = (32, 128, 512, 2048)
_LEARNT = {task.name: task for task in (TASKS["digits"], PERCEPTRON, TASKS["mnist1d"], TASKS["characters"])}
_EPOCHS = {"digits": 16, PERCEPTRON.name: 16, "mnist1d": 16, "characters": 0.5}
_NOWHERE = Site(Cluster(1, 1, Link(1e9), Link(1e9)), Workload.of_step(1e6, 1.0))


def _key(task: str, batch: int) -> str:
    return f"{task}, batch {batch}"


def _make(seed: int, task: str, batch: int) -> Experiment:
    learnt = _LEARNT[task]
    examples = EXAMPLES if task.startswith("mnist1d") else learnt.steps_per_epoch(1)
    steps = max(1, round(_EPOCHS[task] * examples / batch))
    rate = learnt.learning_rate * (batch / learnt.batch) ** 0.5
    return Experiment(_key(task, batch), AllReduce(), 1, steps, rate, batch, learnt, seed=seed)


def _settings() -> list[Setting]:
    return [
        Setting(_key(task, batch), partial(_make, task=task, batch=batch), _NOWHERE)
        for task in _EPOCHS
        for batch in BATCHES
    ]


def _report(results: Results) -> str:
    rows, distinct = [], []
    for task in _EPOCHS:
        samples = [results.accuracy(_key(task, batch)) for batch in BATCHES]
        rows.append(
            [task, f"{_EPOCHS[task]:g}", *(sample.text() for sample in samples), samples[-1].against(samples[0])]
        )
        neighbours = zip(pairwise(BATCHES), pairwise(samples), strict=True)
        pairs = [f"{one} and {two}" for (one, two), (a, b) in neighbours if a.differs_from(b)]
        if samples[0].values:
            distinct.append(f"{task}: {', '.join(pairs) or 'none'}")
    head = ["task", "epochs", *(f"batch {batch}" for batch in BATCHES), f"{BATCHES[-1]} against {BATCHES[0]}"]
    return "\n\n".join([table(head, rows, left=2), f"Neighboring batch sizes that differ: {'; '.join(distinct)}."])


def _draw(results: Results, path: Path) -> None:
    figure, axes = panels(len(_EPOCHS))
    for axis, task in zip(axes, _EPOCHS, strict=True):
        lines(axis, BATCHES, {task: [results.accuracy(_key(task, batch)) for batch in BATCHES]}, ["all_reduce"])
        axis.set(xscale="log", xlabel="examples per step", ylabel="accuracy, held out, %")
        axis.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
        axis.minorticks_off()
        legend(axis)
    save(figure, path, "One replica, a fixed number of epochs: larger batches, and the spread between seeds")


STUDY = Study(
    "tasks",
    "what the tasks can tell apart",
    "One replica, so no method at all: examples seen are the same, the learning rate follows the square root of the "
    "batch. What a task cannot tell apart here it will not tell apart below.",
    _settings,
    _report,
    _draw,
)
