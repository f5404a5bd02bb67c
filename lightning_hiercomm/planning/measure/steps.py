"""Time training steps of a LightningModule on one rank, in Lightning's loop."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hiercomm._lightning.ddp import register_bucket_hook
from lightning_hiercomm._lightning.tree import fabric, pl
from lightning_hiercomm.comm import streams
from lightning_hiercomm.nodes.connect import process_group
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.planning.cluster import PlanningError
from lightning_hiercomm.planning.measure.stopwatch import Timing, queued_seconds
from lightning_hiercomm.planning.user_code import json_object, load_object
from lightning_hiercomm.schemes.gradients import NodeMean

LEAST_STEPS = 6
_WARM_UP = 3
_BATCH = 8


@dataclass(frozen=True)
class StepTimes:
    """Medians over some steps of one rank.

    Attributes:
        forward: Seconds until the backward pass: data, loop and forward pass.
        backward: Seconds of all backward passes.
        update: Seconds after them.
        processor_seconds: Used by all threads of the process.
        queued_seconds: In which its threads waited for a processor.
        parameters: Number of trained ones.
        bytes_per_parameter: On average.
        state_per_parameter: Numbers that the optimizers keep.
    """

    forward: float
    backward: float
    update: float
    processor_seconds: float
    queued_seconds: float
    parameters: int
    bytes_per_parameter: float
    state_per_parameter: float

    @property
    def seconds(self) -> float:
        """Seconds of a whole optimizer step."""
        return self.forward + self.backward + self.update

    @property
    def timing(self) -> Timing:
        """The times of a whole optimizer step."""
        return Timing(self.seconds, self.processor_seconds, self.queued_seconds)


def time_steps(
    module: pl.LightningModule,
    data: Any,
    device: torch.device,
    seconds: float = 5.0,
    average_in: Topology | None = None,
    steps: int | None = None,
) -> StepTimes:
    """Train and time a module on this rank alone, or with gradients averaged over its node.

    Args:
        module: Is trained, and changed.
        data: Dataloaders, a datamodule, or None if the module has its own.
        device: Of this rank.
        seconds: Least duration.
        average_in: Averages gradients in this rank's node; collective over the node.
        steps: Number of steps, instead of a duration.
    """
    clock = _Clock(device, seconds, steps)
    with _quiet():
        trainer = pl.Trainer(
            accelerator="cpu" if device.type == "cpu" else "gpu",
            strategy=pl.strategies.SingleDeviceStrategy(device) if average_in is None else _InNode(device, average_in),
            # this rank trains alone, whatever the launcher
            plugins=[fabric.plugins.environments.lightning.LightningEnvironment()],
            devices=1,
            max_epochs=-1,
            limit_val_batches=0,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        if isinstance(data, pl.LightningDataModule):
            trainer.fit(module, datamodule=data)
        else:
            trainer.fit(module, data)
    return clock.result(module, trainer.optimizers)


class _InNode(pl.strategies.SingleDeviceStrategy):
    """A rank that averages its gradients as ``HierarchicalStrategy`` does inside a node."""

    def __init__(self, device: torch.device, topology: Topology) -> None:
        super().__init__(device)
        self._topology = topology

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        assert self.model is not None
        group = process_group(self._topology.intra)
        self.model = DistributedDataParallel(self.model, process_group=group, gradient_as_bucket_view=True)
        register_bucket_hook(self.model, NodeMean(self._topology).reduce_bucket)


class _Clock(pl.Callback):
    """Records the times of steps and backward passes, and ends the run after enough of them."""

    def __init__(self, device: torch.device, seconds: float, steps: int | None) -> None:
        self._device = device
        self._seconds = seconds
        self._steps_to_take = steps
        self._began = time.perf_counter()
        self._ends: list[tuple[float, float, float]] = []
        self._steps: list[tuple[float, float, float]] = []
        self._backward_began = 0.0
        self._backward = 0.0
        self._backward_ended = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = self._now()
        self._ends.append((self._began, time.process_time(), queued_seconds()))

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._backward_began = self._now()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._backward_ended = self._now()
        self._backward += self._backward_ended - self._backward_began

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, (before, *_) = self._now(), self._ends[-1]
        update = now - self._backward_ended if self._backward else 0.0
        self._steps.append((now - before - self._backward - update, self._backward, update))
        self._ends.append((now, time.process_time(), queued_seconds()))
        self._backward = 0.0
        if self._steps_to_take is not None:
            trainer.should_stop = len(self._steps) >= self._steps_to_take
        else:
            trainer.should_stop = len(self._steps) >= LEAST_STEPS and now - self._began >= self._seconds

    def result(self, module: pl.LightningModule, optimizers: list[torch.optim.Optimizer]) -> StepTimes:
        steps = self._steps[_WARM_UP:]
        if len(steps) < LEAST_STEPS - _WARM_UP:
            raise PlanningError(f"{type(module).__name__} took {len(self._steps)} steps only: its training ended early")
        total = median(map(sum, steps))
        parts = [median(step[i] for step in steps) for i in range(3)]
        forward, backward, update = (part * total / sum(parts) for part in parts)  # medians need not add up
        (_, worked, queued), (_, has_worked, has_queued) = self._ends[_WARM_UP], self._ends[-1]
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        count = sum(parameter.numel() for parameter in trained)
        state = [
            value.numel()
            for optimizer in optimizers
            for held in optimizer.state.values()
            for value in held.values()
            if isinstance(value, Tensor) and value.numel() > 1
        ]
        return StepTimes(
            forward,
            backward,
            update,
            processor_seconds=(has_worked - worked) / len(steps),
            queued_seconds=(has_queued - queued) / len(steps),
            parameters=count,
            bytes_per_parameter=sum(p.numel() * p.element_size() for p in trained) / max(1, count),
            state_per_parameter=sum(state) / max(1, count),
        )

    def _now(self) -> float:
        streams.synchronize(self._device)
        return time.perf_counter()


# ---- modules ---------------------------------------------------------------------------------------------------------


def load_module(path: str, arguments: str | None = None) -> pl.LightningModule:
    """Build a LightningModule that has its own dataloader.

    Args:
        path: Of the class: ``"package.module:Class"``.
        arguments: Of its constructor, as a JSON object.

    Raises:
        PlanningError: If there is no such module, or it has no ``train_dataloader``.
    """
    made, values = load_object("--module", path), json_object("--module-args", arguments, '{"width": 512}')
    try:
        module = made(**values)
    except TypeError as error:
        raise PlanningError(f"{path} cannot be made: {error}; give its arguments with --module-args") from error
    if not isinstance(module, pl.LightningModule):
        raise PlanningError(f"{path} is not a LightningModule of `{pl.__name__}`")
    if not pl.utilities.model_helpers.is_overridden("train_dataloader", module, pl.LightningModule):
        raise PlanningError(f"{path} has no train_dataloader: define one in a subclass, or use --params instead")
    return module


class StandIn(pl.LightningModule):
    """Square layers with about ``parameters`` parameters, trained by Adam on noise."""

    def __init__(self, parameters: float, layers: int = 8) -> None:
        super().__init__()
        self.width = max(8, round((parameters / layers) ** 0.5))
        pairs = ((nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(layers))
        self.layers = nn.Sequential(*(layer for pair in pairs for layer in pair))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean square of the outputs."""
        return torch.as_tensor(self.layers(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use Adam."""
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> Any:
        """Repeat one batch of noise."""
        return repeat(torch.randn(_BATCH, self.width))


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (pl.__name__, fabric.__name__)]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
