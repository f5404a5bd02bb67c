"""Train a method's nodes as threads of one process, on one device; a run that was killed continues."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.language import corpus
from benchmarks.language.methods import METHODS
from benchmarks.language.model import SIZES, Size, Transformer, adamw, loss_of
from benchmarks.simulate.simulation import Experiment, Replica
from benchmarks.simulate.tasks import Examples, Task, Turn
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.run.training_run import TrainingRun

_LONGEST_WAIT = 3600.0
_EVALUATED_AT_ONCE = 32
_one_at_a_time = threading.Lock()
"""Nodes that compute in turns find their parameters in the processor's cache."""

Point = tuple[int, float, float]
"""Steps, and the loss of the averaged model on the tuning and on the judging part."""


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        size: Of the model, a name of `SIZES`.
        method: A name of `METHODS`.
        learning_rate: The highest.
        seed: Of the model and the batches.
        nodes: Number of nodes.
        device: Of all nodes.
        short: Whether it only compares learning rates.
    """

    size: str
    method: str
    learning_rate: float
    seed: int
    nodes: int = 8
    device: str = "cpu"
    short: bool = False

    @property
    def of_size(self) -> Size:
        """The size itself."""
        return SIZES[self.size]

    @property
    def has_curve(self) -> bool:
        """Whether it is evaluated after every epoch; other seeds are only compared at their ends."""
        return not self.short and self.seed == 0

    @property
    def steps(self) -> int:
        """Optimizer steps, eight epochs."""
        return self.of_size.short if self.short else self.of_size.steps

    def experiment(self) -> Experiment:
        """Return what the simulation trains."""
        size, method = self.of_size, METHODS[self.method]
        return Experiment(
            method.title,
            method.make(self.steps),
            self.nodes,
            self.steps,
            self.learning_rate,
            size.batch,
            task_of(self.size, self.device),
            wire_dtype=method.wire,
            seed=self.seed,
            clip=1.0,
            epoch=max(1, self.steps // 8),
            gradient_path=method.path and method.path(self.steps),
        )


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        points: Evaluations; the last one is the end of the run.
        sent: Bytes per node and step, as they would be packed.
        seconds: Of this process's processor time, over all its parts.
        wall: Seconds of the clock.
        parts: How often the run was begun or continued.
        parameters: Of the averaged model at the end.
    """

    points: list[Point] = field(default_factory=list)
    sent: float = 0.0
    seconds: float = 0.0
    wall: float = 0.0
    parts: int = 0
    parameters: list[Tensor] = field(default_factory=list, repr=False)


class LanguageTask(Task):
    """A task whose number of classes is known without a look at all targets."""

    def model(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build(0)


@lru_cache(maxsize=1)
def task_of(name: str, device: str = "cpu") -> LanguageTask:
    """Return the task of a size."""
    size = SIZES[name]
    examples = _windows(corpus.load().training, size.length, 1)
    return LanguageTask(
        name,
        lambda _: Transformer(size).to(device),
        lambda: (examples, examples),
        size.batch,
        1e-3,
        adamw,
        (Turn(loss_of),),
    )


def _windows(text: Tensor, length: int, step: int) -> Examples:
    """Return views of the text: inputs, and the bytes that follow each of theirs."""
    return text[:-1].unfold(0, length, step), text[1:].unfold(0, length, step)


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, windows: int, length: int) -> float:
    """Return the mean loss of windows at equal distances."""
    inputs, targets = _windows(text, length, max(length, (len(text) - length - 1) // windows))
    inputs, targets = inputs[:windows], targets[:windows]
    batches = zip(inputs.split(_EVALUATED_AT_ONCE), targets.split(_EVALUATED_AT_ONCE), strict=True)
    total = sum(float(loss_of(model, batch)) * len(batch[0]) for batch in batches)
    return total / len(inputs)


@dataclass
class Checkpoint:
    """The file of an unfinished run, and the time that the run has taken.

    Attributes:
        path: Of the file; None: nothing is saved.
        states: Of the nodes, in rank order; empty if nothing was saved.
    """

    path: Path | None
    states: list[dict[str, Any]] = field(default_factory=list)

    def open(self) -> Outcome:
        """Read what was saved, if anything was."""
        outcome = Outcome()
        if self.path is not None and self.path.exists():
            saved = torch.load(self.path, weights_only=False)
            self.states, outcome = saved["nodes"], saved["outcome"]
        outcome.parts += 1
        self._before = outcome.seconds, outcome.wall
        self._began = time.process_time(), time.perf_counter()
        return outcome

    def clock(self, outcome: Outcome) -> None:
        """Add the time since the file was opened."""
        outcome.seconds = self._before[0] + time.process_time() - self._began[0]
        outcome.wall = self._before[1] + time.perf_counter() - self._began[1]

    def write(self, states: list[dict[str, Any]], outcome: Outcome) -> None:
        """Replace the file at once or not at all."""
        assert self.path is not None
        self.clock(outcome)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"nodes": states, "outcome": outcome}, self.path.with_suffix(".tmp"))
        os.replace(self.path.with_suffix(".tmp"), self.path)


def train(plan: Plan, checkpoint: Path | None = None, after_step: Callable[[int], None] = lambda _: None) -> Outcome:
    """Train all nodes of a run.

    Args:
        plan: The run.
        checkpoint: A file to continue from, which is replaced after every epoch; the caller removes it.
        after_step: Called with the number of steps after each; what it raises ends the run.

    Raises:
        NonfiniteError: If parameters became NaN or infinite.
    """
    torch.set_num_threads(1)
    files = Checkpoint(checkpoint)
    outcome = files.open()
    corpus.load()  # before threads ask for it
    experiment = plan.experiment()
    initial = experiment.task.model(plan.seed)

    def work(rank: int, world: ThreadWorld) -> Node:
        node = Node(plan, initial, rank, world, outcome)
        node.run(files, after_step)
        return node

    nodes = ThreadWorld(plan.nodes, _LONGEST_WAIT).run(work)
    files.clock(outcome)
    packed = METHODS[plan.method].packed
    outcome.sent = packed * sum(node.sent for node in nodes) / plan.nodes / experiment.steps
    outcome.parameters = [parameter.detach() for parameter in nodes[0].module.parameters()]
    return outcome


class Node(Replica):
    """One node of a run, which saves and continues."""

    def __init__(self, plan: Plan, initial: nn.Module, rank: int, world: ThreadWorld, outcome: Outcome) -> None:
        super().__init__(plan.experiment(), initial, rank, world)
        self._plan, self._outcome = plan, outcome

    def run(self, files: Checkpoint, after_step: Callable[[int], None]) -> None:
        """Train to the end, from the last checkpoint on."""
        experiment, epoch = self.experiment, self.experiment.steps_per_epoch
        saved = files.states and files.states[self.topology.rank]
        first = saved["step"] if saved else 0

        def restore(run: TrainingRun) -> None:
            if saved:
                self._restore(run, saved)

        with self.started(restore) as run:
            for step in range(first, experiment.steps):
                if step % epoch == 0:
                    run.begin_epoch(step // epoch)
                is_last = (step + 1) % epoch == 0 or step + 1 == experiment.steps
                self.take_step(run, step, last=is_last)
                if is_last:
                    run.end_epoch()
                    if step + 1 < experiment.steps:
                        if self._plan.has_curve:
                            self.evaluate(run, step + 1)
                        self._save(run, step + 1, files)
                if self.topology.rank == 0:
                    after_step(step + 1)
            run.schemes[0].state.settle()
            self.sent += self.meter.bytes["inter"]
            run.finish()
            self.evaluate(None, experiment.steps)

    def compute_gradients(self, turn: Turn, optimizer: Optimizer, batch: Examples) -> Tensor:
        with _one_at_a_time:
            return super().compute_gradients(turn, optimizer, batch)

    def evaluate(self, run: TrainingRun | None, step: int) -> None:
        """Evaluate the averaged model on both held-out parts; after the end of the run (None) the module holds it."""
        if run is not None:
            run.schemes[0].state.settle()  # or what is pending would count as sent for the evaluation
        before = self.meter.bytes["inter"]
        if run is not None:
            run.averaged_model.enter()
            self.sent -= self.meter.bytes["inter"] - before
        if self.topology.rank == 0:
            size, texts = self._plan.of_size, corpus.load()
            losses = [
                held_out_loss(self.module, text, windows, size.length)
                for text, windows in zip((texts.tuning, texts.judging), size.windows, strict=True)
            ]
            self._outcome.points.append((step, *losses))
        if run is not None:
            run.averaged_model.leave()

    def _save(self, run: TrainingRun, step: int, files: Checkpoint) -> None:
        """Rank 0 writes the state of all nodes, which wait for it."""
        if files.path is None:
            return
        for scheme in run.schemes:
            scheme.state.settle()
        state = {
            "step": step,
            "module": self.module.state_dict(),
            "optimizer": run.optimizers[0].state_dict(),
            "scheme": run.schemes[0].state_dict(),
            "gradients": run.gradients.state_dict(),
            "batches": self.batches.state_dict(),
            "sent": self.sent + self.meter.bytes["inter"],
        }
        states = self.topology.world.all_gather_object(state)
        if self.topology.rank == 0:
            files.write(states, self._outcome)
        self.topology.world.all_gather_object(None)

    def _restore(self, run: TrainingRun, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        run.optimizers[0].load_state_dict(state["optimizer"])
        run.schemes[0].load_state_dict(state["scheme"])
        run.gradients.load_state_dict(state["gradients"])
        self.batches.load_state_dict(state["batches"])
        self.sent = state["sent"]
