"""What a rank is asked to do, and what it writes down while doing it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.network import busy_since, processor_time, transmitted_bytes
from benchmarks.workloads import WORKLOADS, Workload, judged, loss_of, parameter_count


@dataclass(frozen=True)
class Job:
    """One contender doing one piece of work once.

    Args:
        id: Names the job's files.
        row: Key of the row in :data:`benchmarks.contenders.ROWS`.
        workload: Key in :data:`benchmarks.workloads.WORKLOADS`.
        warmup: Steps before the clock starts.
        steps: Steps on the clock. One more step follows them, so that what happens at the end of a run is not timed.
        evaluate_every: Steps between measurements of the held-out accuracy, off the clock; 0 for none.
        trace: Whether to also record the timeline of compute and network traffic.
        seed: Seeds the data; the model is the same for all.
        timeout: Seconds after which the job counts as hung.
        learning_rate: Of the workload's optimizer; None is the workload's own.
        device: ``"cpu"``, or ``"cuda"``: mixed with bfloat16, over nccl.
    """

    id: str
    row: str
    workload: str
    warmup: int
    steps: int
    evaluate_every: int = 0
    trace: bool = False
    seed: int = 0
    timeout: float = 120.0
    learning_rate: float | None = None
    device: str = "cpu"

    @property
    def total_steps(self) -> int:
        return self.warmup + self.steps + 1


@dataclass(frozen=True)
class World:
    """The rank of this process, from torchrun's environment."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_environment(cls) -> World:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(os.environ[name]) for name in names))

    @property
    def node(self) -> int:
        return self.rank // self.local_size

    @property
    def nodes(self) -> int:
        return self.size // self.local_size


@dataclass
class Record:
    """What one rank measured in one job. Times are of the machine's monotonic clock, the same for all ranks.

    The window is the steps on the clock; ``window_busy_share`` includes other programs. ``messages`` are those between
    nodes per step, and ``last_loss`` is the loss of the last step; ``peak_models`` is the largest memory of a GPU, in
    float32 models.
    """

    job: str
    rank: int
    node: int
    began: float = 0.0
    bytes_at_begin: int = 0
    step_ends: list[float] = field(default_factory=list)
    window_bytes: int = 0
    window_processor_seconds: float = 0.0
    window_busy_share: float | None = None
    compute: list[tuple[float, float]] = field(default_factory=list)
    traffic: list[tuple[float, int]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    disagreement: float | None = None
    messages: float | None = None
    last_loss: float | None = None
    peak_models: float | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Recorder:
    """Takes the times and counts the bytes of one job on one rank.

    A contender calls :meth:`loss` for every forward pass and :meth:`step_done` after every step.
    """

    def __init__(self, job: Job, world: World, interface: str) -> None:
        self.job, self.world = job, world
        self.workload: Workload = WORKLOADS[job.workload]
        self.record = Record(job.id, world.rank, world.node)
        self._interface = interface
        self._bytes_at_start = 0
        self._processor_seconds_at_start = 0.0
        self._machine_at_start = (0, 0)
        self._paused_seconds = 0.0
        self._paused_bytes = 0
        self._pause: tuple[float, int] | None = None
        self._forward_began = 0.0
        self._batches = self.workload.batches(world.rank, world.size, job.seed)
        self._last_loss: Tensor | None = None
        self._held_out = self.workload.held_out() if self.workload.held_out and job.evaluate_every else None

    @property
    def held_out(self) -> tuple[Tensor, Tensor]:
        assert self._held_out is not None
        return self._held_out

    def model(self) -> nn.Module:
        """A fresh model. With tracing, the end of its backward pass is recorded too."""
        model = self.workload.model()
        if self.job.trace:
            first = next(model.parameters())  # its gradient is the last to be ready
            first.register_post_accumulate_grad_hook(lambda _: self._backward_done())
        return model

    def next_batch(self) -> tuple[Tensor, Tensor]:
        return next(self._batches)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of one batch."""
        self._forward_began = time.monotonic()
        if not self.record.began:
            self.record.began, self.record.bytes_at_begin = self._forward_began, self._sent()
        loss = loss_of(model, batch)
        self._last_loss = loss.detach()
        return loss

    def step_done(self) -> bool:
        """Note the end of a step; returns whether it was the last one."""
        ends = self.record.step_ends
        if self.job.device == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        if len(ends) < self.job.total_steps - 1:
            ends.append(now - self._paused_seconds)
            if len(ends) == self.job.warmup:
                self._bytes_at_start = self._sent()
                self._processor_seconds_at_start = time.process_time()
                self._machine_at_start = processor_time()
            if len(ends) == self.job.warmup + self.job.steps:
                self.record.window_bytes = self._sent() - self._bytes_at_start
                self.record.window_processor_seconds = time.process_time() - self._processor_seconds_at_start
                self.record.window_busy_share = busy_since(self._machine_at_start)
            return False
        return True

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the workload's optimizer, with the job's learning rate if it has one."""
        optimizer = self.workload.optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] if self.job.learning_rate is None else self.job.learning_rate
        return optimizer

    def evaluation_due(self) -> bool:
        every = self.job.evaluate_every
        return bool(every) and len(self.record.step_ends) % every == 0

    @property
    def evaluating(self) -> bool:
        """Whether the clock is stopped."""
        return self._pause is not None

    def begin_evaluation(self) -> None:
        """Stop the clock and the byte count."""
        if self._pause is None:
            self._pause = (time.monotonic(), transmitted_bytes(self._interface))

    def end_evaluation(self, accuracy: float, loss: float) -> None:
        """Note held-out accuracy and loss, and start clock and byte count again."""
        assert self._pause is not None
        began, sent = self._pause
        self._pause = None
        self.record.evaluations.append(
            {
                "step": len(self.record.step_ends),
                "seconds": began - self._paused_seconds,
                "bytes": sent - self._paused_bytes,
                "accuracy": accuracy,
                "loss": loss,
            }
        )
        self._paused_seconds += time.monotonic() - began
        self._paused_bytes += transmitted_bytes(self._interface) - sent

    def evaluate_mean(self, model: nn.Module) -> None:
        """Measure the accuracy of the ranks' mean; for contenders that have no evaluation of their own."""
        self.begin_evaluation()
        mean = self.workload.model()
        mean.load_state_dict(model.state_dict())
        for parameter in mean.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= self.world.size
        accuracy, loss = judged(mean, self.held_out)
        dist.barrier()
        self.end_evaluation(accuracy, loss)

    def finish(self, model: nn.Module) -> None:
        """Note how far apart the ranks ended: the largest distance from the mean, relative to the mean's norm."""
        self.record.last_loss = None if self._last_loss is None else float(self._last_loss)
        if self.job.device == "cuda":  # where a model would take seconds on a slow link
            self.record.peak_models = torch.cuda.max_memory_allocated() / (4 * parameter_count(model))
            return
        with torch.no_grad():
            mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            mean = mine.clone()
            dist.all_reduce(mean)
            mean /= self.world.size
            distance = (mine - mean).norm() / mean.norm()
            dist.all_reduce(distance, dist.ReduceOp.MAX)
            self.record.disagreement = float(distance)

    def _sent(self) -> int:
        return transmitted_bytes(self._interface) - self._paused_bytes

    def _backward_done(self) -> None:
        self.record.compute.append((self._forward_began, time.monotonic()))


Contender = Callable[[Recorder, dict[str, Any]], None]
"""``train(recorder, options)``: does ``recorder.job`` and returns when it is done, on every rank."""
