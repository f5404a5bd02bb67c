"""Train many replicas with the real schemes on one machine, and predict the time that a cluster would take."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.predict.cluster import Cluster, Workload
from benchmarks.predict.cost import predict
from benchmarks.predict.cycles import next_step
from benchmarks.simulate.tasks import Batches, Examples, OptimizerMaker, Task, Turn
from lightning_hiercomm.comm.codec import Codec
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.nodes.topology import Topology, nodes_by_count
from lightning_hiercomm.run.replicas import Replicas, trained_by
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import RunningScheme, Scheme
from lightning_hiercomm.schemes.gradient_path import GradientPath

_LONGEST_WAIT = 600.0
_SECONDS_BETWEEN_WAKES = 1e-4


@dataclass(frozen=True)
class Site:
    """The cluster whose step times are predicted."""

    cluster: Cluster
    workload: Workload


@dataclass(frozen=True)
class Experiment:
    """One run.

    Attributes:
        label: Its name in tables.
        scheme: The scheme.
        nodes: Number of nodes.
        ranks_per_node: Ranks of each node; all are simulated.
        task: The model and its examples.
        steps: Optimizer steps.
        batch: Examples that a rank uses per step.
        learning_rate: The highest. It rises over the first tenth of the run (Goyal et al. 2017) and falls to 0 along a
            cosine.
        wire_dtype: As for the strategy, or a codec that is tried out.
        seed: Of the model and of the batches.
        optimizer: Makes optimizers. Default: the task's.
        batches: Examples per step by world rank, instead of ``batch``.
        weights: Weights of the ranks' gradients by world rank. Default: by their examples.
        shards: Divide every epoch's examples among the ranks, as a distributed sampler does. Default: every rank draws
            from all examples, with replacement.
        average_optimizer_state: As for the strategy.
        clip: The largest norm of a gradient, after it was averaged.
        epoch: Steps of an epoch. Default: as many as use every example once.
        gradient_path: Averages gradients instead of the scheme.
    """

    label: str
    scheme: Scheme
    nodes: int
    steps: int
    learning_rate: float
    batch: int
    task: Task
    ranks_per_node: int = 1
    wire_dtype: str | Codec | None = None
    seed: int = 0
    optimizer: OptimizerMaker | None = None
    batches: tuple[int, ...] | None = None
    weights: tuple[float, ...] | None = None
    shards: bool = False
    average_optimizer_state: bool = False
    clip: float | None = None
    epoch: int | None = None
    gradient_path: Callable[[Topology, nn.Module], GradientPath] | None = None

    @property
    def replicas(self) -> int:
        """Number of all ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, at most those of the run."""
        return min(self.steps, self.epoch or self.task.steps_per_epoch(sum(self.sizes)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples per step by world rank."""
        return self.batches or (self.batch,) * self.replicas


@dataclass(frozen=True)
class Point:
    """The averaged model at one moment.

    Attributes:
        step: Optimizer steps so far.
        seconds: Their predicted time on the cluster.
        accuracy: On held-out examples, by the task's own measure.
        loss: On held-out examples.
    """

    step: int
    seconds: float
    accuracy: float
    loss: float


@dataclass(frozen=True)
class Curve:
    """The result of one experiment.

    Attributes:
        experiment: The experiment.
        points: In the order of steps; the last one is the end of the run.
        inter_bytes: Mean bytes per step that a node sent to others; NaN if the run ended early.
        took: Seconds on this machine.
        parameters: Parameters of the averaged model at the end.
    """

    experiment: Experiment
    points: list[Point]
    inter_bytes: float
    took: float
    parameters: list[Tensor] = field(repr=False, default_factory=list)

    @property
    def best(self) -> Point:
        """The first point with the highest accuracy."""
        return max(self.points, key=lambda point: point.accuracy)

    def first_to_reach(self, accuracy: float) -> Point | None:
        """Return the first point with at least this accuracy; None without any."""
        return next((point for point in self.points if point.accuracy >= accuracy), None)


class VirtualClock:
    """Predicts each step's time on a cluster, by the phase of the scheme."""

    def __init__(self, experiment: Experiment, site: Site) -> None:
        self._experiment = experiment
        self._cluster = replace(site.cluster, nodes=experiment.nodes)
        self._workload = site.workload
        self._known: dict[str, float] = {}

    def seconds_of_step(self, scheme: RunningScheme[Scheme]) -> float:
        """Return the predicted time of the scheme's next step."""
        next_one = next_step(scheme, self._experiment.steps_per_epoch)
        key = repr(next_one)
        if key not in self._known:
            wire = self._experiment.wire_dtype
            if isinstance(wire, Codec):
                raise ValueError(f"the cost model does not know {wire}: name a wire_dtype of the package")
            prediction = predict(next_one, self._cluster, self._workload, wire)
            self._known[key] = prediction.seconds
        return self._known[key]


def simulate(experiment: Experiment, site: Site, evaluations: int = 10) -> Curve:
    """Train all replicas as threads of this process, with the scheme's own code.

    Sums are made in rank order and every replica has its own random batches, so a run gives the same bits each time.

    Raises:
        ValueError: If the scheme does not support the experiment.
        NonfiniteError: If the scheme finds that parameters are NaN or infinite.
    """
    began = time.perf_counter()
    clock = VirtualClock(experiment, site)
    replicas = _trained(experiment, clock, evaluations)
    first = replicas[0]
    sent = fmean(replica.sent for replica in replicas) * experiment.ranks_per_node
    parameters = [parameter.detach() for parameter in first.module.parameters()]
    return Curve(experiment, first.points, sent / experiment.steps, time.perf_counter() - began, parameters)


def _trained(experiment: Experiment, clock: VirtualClock, evaluations: int) -> list[Replica]:
    """Train all replicas, each on a thread; return them in rank order."""
    initial = experiment.task.model(experiment.seed)  # not on the threads, which share one random number generator

    def work(rank: int, world: ThreadWorld) -> Replica:
        replica = Replica(experiment, initial, rank, world)
        replica.train(clock, evaluations)
        return replica

    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    # waiting threads wake up at this interval to request the interpreter's lock: thousands would do little else
    sys.setswitchinterval(max(interval, experiment.replicas * _SECONDS_BETWEEN_WAKES))
    try:
        return ThreadWorld(experiment.replicas, _LONGEST_WAIT).run(work)
    finally:
        torch.set_num_threads(threads)
        sys.setswitchinterval(interval)


class Replica:
    """One rank of an experiment, on a thread of its own.

    Attributes:
        experiment: What it takes part in.
        topology: The nodes.
        meter: Counts what it sends.
        module: The trained module.
        batches: What it draws from.
        points: Evaluations of the averaged model, on rank 0.
        sent: Bytes that this rank sent to other nodes, without those for evaluations.
    """

    def __init__(self, experiment: Experiment, initial: nn.Module, rank: int, world: ThreadWorld) -> None:
        torch.set_num_threads(1)  # the setting belongs to a thread
        self.experiment = experiment
        self.meter = Meter()
        nodes = nodes_by_count(experiment.ranks_per_node, experiment.replicas)
        weights = experiment.weights or experiment.batches
        self.topology = Topology(nodes, rank, world.connect(rank, self.meter), self.meter, weights)
        self.module = copy.deepcopy(initial)
        task, make = experiment.task, experiment.optimizer or experiment.task.optimizer
        self._turns = [
            (turn, make(self.module.get_submodule(turn.part).parameters(), experiment.learning_rate))
            for turn in task.turns
        ]
        sizes = experiment.sizes
        shard = (sum(sizes[:rank]), sum(sizes)) if experiment.shards else None
        self.batches = Batches(task, rank, sizes[rank], experiment.seed, shard)
        self._seconds = 0.0
        self.points: list[Point] = []
        self.sent = 0.0

    def train(self, clock: VirtualClock, evaluations: int) -> None:
        experiment = self.experiment
        evaluated = {experiment.steps * (i + 1) // evaluations for i in range(evaluations)}
        with self.started() as run:
            self._train(run, clock, evaluated)
            self.sent += self.meter.bytes["inter"]
            run.finish()
            self._evaluate(None, experiment.steps, self._seconds)

    def _train(self, run: TrainingRun, clock: VirtualClock, evaluated: set[int]) -> None:
        experiment, per_epoch = self.experiment, self.experiment.steps_per_epoch
        for step in range(experiment.steps):
            if step % per_epoch == 0:
                run.begin_epoch(step // per_epoch)
            is_last = (step + 1) % per_epoch == 0 or step + 1 == experiment.steps
            if self.topology.rank == 0:  # which is the one that evaluates
                self._seconds += clock.seconds_of_step(run.schemes[0])
            self.take_step(run, step, last=is_last)
            if is_last:
                run.end_epoch()
            if step + 1 in evaluated and step + 1 < experiment.steps:
                self._evaluate(run, step + 1, self._seconds)

    def take_step(self, run: TrainingRun, step: int, last: bool) -> None:
        """Draw a batch, and let every optimizer step."""
        experiment, batch = self.experiment, self.batches.draw()
        for turn, optimizer in self._turns:
            optimizer.param_groups[0]["lr"] = experiment.learning_rate * schedule(step, experiment.steps)
            run.step(optimizer, partial(self._step, run, turn, optimizer, batch), last=last)

    @contextmanager
    def started(self, restore: Callable[[TrainingRun], None] = lambda _: None) -> Iterator[TrainingRun]:
        """Begin a run, and close it in the end; ``restore`` is called before it begins."""
        experiment, wire = self.experiment, self.experiment.wire_dtype
        optimizers = [optimizer for _, optimizer in self._turns]
        replicas = Replicas(self.module, optimizers)
        make = experiment.gradient_path
        run = TrainingRun(
            experiment.scheme,
            replicas,
            self.topology,
            Wire(wire),
            experiment.average_optimizer_state,
            make(self.topology, self.module) if make else None,
        )
        try:
            restore(run)
            run.begin(-(-experiment.steps // experiment.steps_per_epoch), experiment.steps)
            yield run
        finally:
            run.close(timeout=1.0)

    def _step(self, run: TrainingRun, turn: Turn, optimizer: Optimizer, batch: Examples) -> None:
        """Take an optimizer's step, with gradients averaged as DDP averages them."""
        run.loss.add(self.compute_gradients(turn, optimizer, batch))
        gradients = [parameter.grad for parameter in trained_by(optimizer) if parameter.grad is not None]
        if run.gradients_over != "none" and self.topology.world_size > 1:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            run.gradients.reduce(flat).wait()
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        if self.experiment.clip is not None:
            nn.utils.clip_grad_norm_(trained_by(optimizer), self.experiment.clip)
        optimizer.step()

    def compute_gradients(self, turn: Turn, optimizer: Optimizer, batch: Examples) -> Tensor:
        """Compute this rank's gradients, and return the loss."""
        optimizer.zero_grad()
        loss = turn.loss(self.module, batch)
        loss.backward()
        return loss

    def _evaluate(self, run: TrainingRun | None, step: int, seconds: float) -> None:
        """Evaluate the averaged model; after the end of the run (None) the module holds it."""
        before = self.meter.bytes["inter"]
        if run is not None:
            run.averaged_model.enter()
            self.sent -= self.meter.bytes["inter"] - before
        if self.topology.rank == 0:
            _, held_out = self.experiment.task.load()
            self.module.eval()
            self.points.append(Point(step, seconds, *self.experiment.task.judge(self.module, held_out)))
            self.module.train()
        if run is not None:
            run.averaged_model.leave()


def schedule(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of the highest."""
    rising = max(1, steps // 10)
    return (step + 1) / rising if step < rising else 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))
