"""Nodes with unequal numbers of batches: one without batches idles until all nodes are done.

Every rank's Trainer goes through equally many batches, so that synchronizations, validations, checkpoints and the end
of the run come at the same batch on all ranks. On an idle node a batch is neither evaluated nor used by the optimizer.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_hiercomm._lightning.ddp import average_present_gradients, forward_nothing
from lightning_hiercomm._lightning.trainer import (
    accumulates,
    batches_begun,
    parts_of_loader,
    put_callback_first,
    share_logged_names,
    takes_dataloader_iter,
    wrap_train_dataloaders,
)
from lightning_hiercomm._lightning.tree import fabric, pl
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import ParameterSync, Scheme
from lightning_hiercomm.schemes.optimizer_state import evaluates_loss
from lightning_hiercomm.schemes.preflight import launch
from lightning_hiercomm.schemes.samples import SampleWeights

log = logging.getLogger(__name__)

_CHECK_EVERY = 50
"""Optimizer steps between two checks for the end of an epoch of unknown length, in which nodes do not synchronize."""


class IdlingLoader(pl.utilities.CombinedLoader):
    """Yields this rank's batches, and then its last batch again until all nodes are done.

    A rank that had no batch yet, because it was resumed, yields its first batch, or an empty tuple if it has no length.

    If the loaders have a length, ranks exchange the lengths when an epoch begins. Otherwise ranks of a node compare at
    every batch whether all have one. Nodes compare it after every ``check_every()`` batches, and the epoch ends there.

    Args:
        loader: The train dataloaders.
        mode: How several are combined.
        topology: The nodes.
        device: The device of the ranks' tensors.
        position: Returns the number of batches that have begun in this epoch.
        check_every: Returns the number of batches between two checks for the end of all nodes' data.
    """

    def __init__(
        self,
        loader: object,
        mode: Literal["min_size", "max_size_cycle", "max_size", "sequential"],
        topology: Topology,
        device: torch.device,
        position: Callable[[], int],
        check_every: Callable[[], int],
    ) -> None:
        super().__init__(loader, mode)
        self._topology = topology
        self._device = device
        self._position = position
        self._check_every = check_every
        self._lengths: tuple[int, int] | None = None  # of this node, and of the longest
        self._yielded = 0  # in this epoch, in this process
        self._first_idle: int | None = None  # of these
        self._begins_at: int | None = None  # the index of the first of these in the epoch
        self._own: tuple[Any, int, int] | None = None  # the last batch
        self._has_warned = False

    def is_idle(self, batch_idx: int) -> bool:
        """Return whether a batch of this epoch, which was yielded already, is none of this rank's own."""
        if self._lengths is not None:
            return batch_idx >= self._lengths[0]
        if self._begins_at is None:
            self._begins_at = batch_idx
        return self._first_idle is not None and batch_idx - self._begins_at >= self._first_idle

    @override
    def __iter__(self) -> IdlingLoader:
        """Begin an epoch. Collective."""
        super().__iter__()
        self._yielded, self._first_idle, self._begins_at = 0, None, None
        # on all ranks, or on none
        is_sized = all(fabric.utilities.data.sized_len(each) is not None for each in self.flattened)
        own = super().__len__() if is_sized else None
        everyone = self._topology.world.all_gather_object((own, self._divided_dataset()))
        lengths = [length for length, _ in everyone]
        self._check_division([samples for _, samples in everyone])
        self._lengths = None
        if is_sized:
            of_nodes = [min(lengths[rank] for rank in ranks) for ranks in self._topology.nodes]
            self._lengths = of_nodes[self._topology.node], max(of_nodes)
            self._warn_of_unused(lengths)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return pl.utilities.CombinedLoader, parts_of_loader(self)  # a pickled trainer has no process groups

    def _divided_dataset(self) -> int | None:
        """Return the length of a dataset that Lightning's sampler divides among all ranks."""
        samplers = [getattr(each, "sampler", None) for each in self.flattened]
        world = self._topology.world_size
        return next(
            (
                fabric.utilities.data.sized_len(s.dataset)
                for s in samplers
                if isinstance(s, DistributedSampler) and s.num_replicas == world
            ),
            None,
        )

    def _check_division(self, samples: list[int | None]) -> None:
        if len(set(samples)) > 1:
            raise ValueError(
                f"unequal_data: a DistributedSampler divides each rank's dataset among all {len(samples)} ranks, but"
                f" these have {samples} samples, so most would never be used. Set"
                " Trainer(use_distributed_sampler=False), and divide a node's dataset among its own ranks"
            )

    def _warn_of_unused(self, lengths: list[int]) -> None:
        unequal = [
            f"node {node} has {[lengths[rank] for rank in ranks]} batches on its ranks and uses"
            f" {min(lengths[rank] for rank in ranks)} of each"
            for node, ranks in enumerate(self._topology.nodes)
            if len({lengths[rank] for rank in ranks}) > 1
        ]
        if unequal and not self._has_warned:
            self._has_warned = True
            pl.utilities.rank_zero_warn(
                f"ranks of a node take equally many steps: {'; '.join(unequal)}. The others stay unused"
            )

    @override
    def __len__(self) -> int:
        """Return the number of batches of the longest node.

        Raises:
            TypeError: If it is not known, as ``len`` of an iterable without length does.
        """
        if self._lengths is None:
            raise TypeError("the train dataloaders have no length")
        return self._lengths[1]

    @override
    def __next__(self) -> Any:
        is_own = self._takes_own()
        if not is_own and self._own is None and self._lengths is not None:
            self._load_first()
        own = ((), 0, 0) if self._own is None else self._own
        self._yielded += 1
        batch = own[0]
        return (copy.copy(batch) if isinstance(batch, dict | list) else batch), *own[1:]

    def _takes_own(self) -> bool:
        """Load the next batch; return False if this rank idles, and raise ``StopIteration`` at the end of the epoch."""
        if self._lengths is not None:
            position, (own, longest) = self._position(), self._lengths
            if position >= longest:
                raise StopIteration
            if position < own and not self._loads():
                raise RuntimeError(
                    f"rank {self._topology.rank} (node {self._topology.node}): the train dataloader has a length of"
                    f" {own}, but ended after {position} batches"
                )
            return position < own
        if self._first_idle is None and not self._all_in_node(not self._has_reached_limit() and self._loads()):
            self._first_idle = self._yielded
        if self._yielded % self._check_every() == 0 and not self._any(self._topology.world, self._first_idle is None):
            raise StopIteration
        return self._first_idle is None

    def _has_reached_limit(self) -> bool:
        """Return whether ``limit_train_batches`` ends a loader without length, which Lightning loads one ahead."""
        limit = min(self.limits or [math.inf])
        return self._yielded > 0 and self._position() + 1 >= limit

    def _loads(self) -> bool:
        try:
            self._own = super().__next__()
        except StopIteration:
            return False
        return True

    def _load_first(self) -> None:
        """Load a batch for the hooks of an idle rank, if a resumed process has none."""
        if not self._loads():  # the state of a checkpoint ends the iteration that has begun
            with pl.utilities.seed.isolate_rng():
                super().__iter__()
                self._loads()

    def _all_in_node(self, has_batch: bool) -> bool:
        lacks = self._any(self._topology.intra, not has_batch)
        if has_batch and lacks and not self._has_warned:
            self._has_warned = True
            log.warning(
                "rank %d (node %d) has more batches than another rank of its node. Ranks of a node take equally many"
                " steps, so its last batches stay unused",
                self._topology.rank,
                self._topology.node,
            )
        return not lacks

    def _any(self, group: Communicator, own: bool) -> bool:
        found = torch.tensor([int(own)], device=self._device)
        group.all_reduce(found, op="max").wait()
        return bool(found.item())


class UnequalNodes(pl.Callback):
    """Determines for each batch whether this node idles, and counts its samples.

    Args:
        samples: The name of a logged number that counts them. True: the batch size.
        scheme: The scheme of the run.
        topology: The nodes.
        device: The device of the ranks' tensors.

    Attributes:
        is_idle: Whether this node has no batch of its own at present.
    """

    def __init__(self, samples: bool | str, scheme: Scheme, topology: Topology, device: torch.device) -> None:
        self._logged_name = samples if isinstance(samples, str) else None
        self._scheme = scheme
        self._topology = topology
        self._device = device
        self._loader: IdlingLoader | None = None
        self._size: float | None = None
        self._output: Any = None  # of the last training step, without a graph
        self._samples = 0.0  # since the last optimizer step
        self._batches = 0  # since then
        self._is_in_step = False
        self.is_idle = False

    # ---- a fit ---------------------------------------------------------------------------------------------------

    def attach(self, trainer: pl.Trainer) -> None:
        """Let nodes idle in the epochs of a trainer."""
        put_callback_first(trainer, self)

        def wrap(given: object) -> IdlingLoader:
            self._loader = IdlingLoader(
                *parts_of_loader(given),
                self._topology,
                self._device,
                lambda: batches_begun(trainer),
                lambda: self._every(trainer),
            )
            return self._loader

        wrap_train_dataloaders(trainer, wrap)

    def _every(self, trainer: pl.Trainer) -> int:
        """Return the number of batches between two checks for the end of an epoch: where nodes synchronize anyway."""
        if self._topology.num_nodes == 1:
            return 1
        period = self._scheme.period if isinstance(self._scheme, ParameterSync) else None
        steps = 1 if self._scheme.gradients == "world" else period or _CHECK_EVERY
        return steps * trainer.accumulate_grad_batches

    # ---- a batch -------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._loader is not None
        self.is_idle = self._loader.is_idle(batch_idx)
        self._batches += not self.is_idle
        self._size = None
        if not self.is_idle and self._logged_name is None:
            try:
                self._size = pl.utilities.data.extract_batch_size(batch)
            except (fabric.utilities.exceptions.MisconfigurationException, RecursionError) as error:
                raise ValueError(
                    f"unequal_data: the number of samples of a batch ({type(batch).__name__}) is unknown. Log a number"
                    " in training_step, self.log('samples', ...), and set unequal_data='samples'"
                ) from error

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        share_logged_names(trainer, self._topology.world.all_gather_object)

    def _logged(self, trainer: pl.Trainer, name: str) -> float:
        if name not in trainer.callback_metrics:
            raise ValueError(
                f"unequal_data: the name {name!r} needs self.log({name!r}, ...) in training_step at every step, with"
                " on_step=True"
            )
        return float(trainer.callback_metrics[name])

    def weigh_gradients(self, run: TrainingRun) -> float:
        """Weigh the ranks' gradients by the samples since the last optimizer step. Collective.

        Returns:
            The factor of this rank's gradients. Lightning divides a loss by the number of accumulated batches. A rank
            that has accumulated fewer batches than others would count less per sample.
        """
        unfit = torch.zeros((), dtype=torch.int64, device=self._device)  # not known before the backward pass
        step = run.schemes[0].state.steps
        preflight = launch(self._topology, step, unfit, counts=(self._samples, self._batches))
        run.weigh_gradients(preflight.round)
        return max(preflight.counts[1]) / self._batches if self._batches else 1.0

    # ---- what the strategy calls ---------------------------------------------------------------------------------

    def check_loader(self, dataloader: object) -> None:
        """Raise a ``ValueError`` if only some ranks' train dataloaders have a length. Collective."""
        has_length = self._topology.world.all_gather_object(fabric.utilities.data.sized_len(dataloader) is not None)
        if len(set(has_length)) > 1:
            ranks = [rank for rank, has in enumerate(has_length) if not has]
            raise ValueError(
                f"unequal_data: the train dataloaders of ranks {ranks} have no length, and those of the other ranks"
                " have one: give all ranks an IterableDataset, or all a dataset with a length"
            )

    def check_program(self, trainer: pl.Trainer, run: TrainingRun, ddp_arguments: Mapping[str, Any]) -> None:
        """Raise a ``ValueError`` for a program that an idle node cannot follow."""
        module = trainer.lightning_module
        if not module.automatic_optimization:
            raise ValueError(
                "unequal_data: manual optimization steps in training_step, which an idle node skips: use"
                " automatic optimization"
            )
        if takes_dataloader_iter(module):
            raise ValueError("unequal_data: training_step(dataloader_iter) loads batches itself: let it take a batch")
        for optimizer in run.optimizers:
            if evaluates_loss(optimizer):
                raise ValueError(
                    f"unequal_data: {type(optimizer).__name__} evaluates the loss several times a step, which an idle"
                    " node does not: use another optimizer"
                )
        arguments = [name for name in ("find_unused_parameters", "static_graph") if ddp_arguments.get(name)]
        if arguments and (self._scheme.gradients == "world" or trainer.accumulate_grad_batches > 1):
            raise ValueError(
                f"unequal_data: {arguments[0]}=True needs a backward pass on every rank, which an idle node does not"
                " do: leave it out, or use PeriodicAveraging or DiLoCo without accumulate_grad_batches"
            )

    def training_step(
        self, trainer: pl.Trainer, run: TrainingRun, model: torch.nn.Module | None, step: Callable[[], Any]
    ) -> Any:
        """Take a training step, and count its samples; on an idle node none."""
        if self.is_idle:
            forward_nothing(model)
            return torch.zeros((), device=self._device) if self._output is None else self._output
        self._is_in_step = True
        try:
            output = step()
        finally:
            self._is_in_step = False
        size = self._size if self._logged_name is None else self._logged(trainer, self._logged_name)
        assert size is not None
        self._samples += size
        _samples_of(run).count(size)
        self._output = output.detach() if isinstance(output, Tensor) else output
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            self._output = {**output, "loss": output["loss"].detach()}
        return output

    def replaces_backward(
        self, trainer: pl.Trainer, run: TrainingRun, model: torch.nn.Module | None, end_backward: Callable[[], None]
    ) -> bool:
        """Weigh the gradients, and take part in averaging them on an idle node; return False if this is none."""
        ends_step, factor = not accumulates(trainer), 1.0
        if ends_step and run.gradients_over == "world":
            factor = self.weigh_gradients(run)
        if self.is_idle and ends_step and (self._batches or run.gradients_over == "world"):
            average_present_gradients(model, factor)
            end_backward()
        return self.is_idle

    def optimizer_step(
        self, run: TrainingRun, step: Callable[[], Any], step_without_gradients: Callable[[], Any]
    ) -> Any:
        """Take an optimizer step; one without gradients if this node had no batch since the last one."""
        try:
            if self._batches or run.gradients_over == "world":
                return step()
            return step_without_gradients()  # weight decay and momentum would change the parameters
        finally:
            self._batches, self._samples = 0, 0.0

    def check_outside_step(self, what: str, group: Any | None) -> None:
        """Raise a ``ValueError`` for a collective over all ranks in ``training_step``, which an idle node skips."""
        if self._is_in_step and group is None and self._topology.num_nodes > 1:
            raise ValueError(
                f"unequal_data: {what} in training_step waits for all ranks, but an idle node skips training_step: log"
                " with on_step=False, on_epoch=True, or communicate with group=self.trainer.strategy.node_process_group"
            )


def _samples_of(run: TrainingRun) -> SampleWeights:
    assert run.samples is not None, "the run is made with the same settings"
    return run.samples
