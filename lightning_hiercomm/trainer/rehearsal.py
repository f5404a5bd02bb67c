"""Training steps that leave no trace."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_hiercomm._lightning.trainer import (
    join_train_batches,
    takes_dataloader_iter,
    train_dataloaders,
    training_step_inputs,
)
from lightning_hiercomm.batches.sampler import DividedStream

_LARGEST_CONTAINER = 10_000  # what is in a list longer than that is data, not state

Rehearse = Callable[[int], Callable[[], object]]
"""Gives, for a batch size, a function that runs one training step of that size."""


@contextmanager
def rehearsal(trainer: pl.Trainer) -> Iterator[Rehearse]:
    """Inside, run the user's training step, forward and backward, without consequences.

    Batches are real samples of the train dataset, evenly spread over it (the first ones, of a stream), collated and
    moved as in training; where the training process itself loads its data, each step loads its batch. There is no
    communication, ``self.log`` does nothing, and manual optimization does not step.

    Afterwards everything is as before: parameters, buffers, gradients, metrics and plain attributes (numbers, tensors,
    lists, dictionaries, sets) of the module and its children, learning rates and schedulers, random generators (torch,
    CUDA, NumPy, Python, and those the dataset holds), and the position of the dataloader, which is not touched.

    Args:
        trainer: About to train: everything is set up.

    Raises:
        ValueError: If the training step cannot be called with a batch, naming the way out.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    if takes_dataloader_iter(module):
        raise ValueError(
            'speeds="measure" cannot run a training_step(dataloader_iter): give HeterogeneousBatches speeds=[...]'
        )
    loaders = train_dataloaders(trainer)

    def one_step(batch: Any) -> None:
        batch = strategy.precision_plugin.convert_input(batch)
        batch = strategy.batch_to_device(module._on_before_batch_transfer(batch, dataloader_idx=0), dataloader_idx=0)
        with strategy.precision_plugin.train_step_context():
            output = module.training_step(*training_step_inputs(trainer, batch))
        loss = output.get("loss") if isinstance(output, dict) else output
        if module.automatic_optimization and isinstance(loss, Tensor):
            module.backward(loss)
        # gradients are written, not accumulated, in the first step after zero_grad(set_to_none=True)
        for parameter in module.parameters():
            parameter.grad = None

    def rehearse(size: int) -> Callable[[], object]:
        loaded: list[Any] = []

        def step() -> None:
            if not loaded or any(_is_loaded_by_training(loader) for loader in loaders):
                loaded[:] = [_sample_batch(loader, size) for loader in loaders]
            # the step may change a batch in place
            one_step(join_train_batches(trainer, copy.copy(loaded)))

        return step

    with ExitStack() as undo:
        undo.enter_context(_isolated_generators([loader.dataset for loader in loaders]))
        undo.enter_context(_restored(module))
        undo.enter_context(_restored_optimization(trainer))
        undo.enter_context(_replaced(module, log=lambda *_, **__: None))
        undo.enter_context(_replaced(strategy, optimizer_step=lambda _, closure, *__, **___: closure()))
        loggers, trainer.loggers = trainer.loggers, [DummyLogger() for _ in trainer.loggers]
        undo.callback(setattr, trainer, "loggers", loggers)
        undo.enter_context(torch.enable_grad())
        yield rehearse


def _is_loaded_by_training(loader: DataLoader[Any]) -> bool:
    # every rank reads a stream as a whole, which takes no longer for larger shares
    return loader.num_workers == 0 and not isinstance(loader.dataset, IterableDataset)


def _sample_batch(loader: DataLoader[Any], size: int) -> Any:
    """One batch, by a loader of its own: the user's keeps its position, and workers keep their dataset's state."""
    dataset: Any = loader.dataset
    how: dict[str, Any] = {"collate_fn": loader.collate_fn, "generator": torch.Generator()}
    if loader.num_workers:
        how |= {
            "num_workers": 1,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    if isinstance(dataset, DividedStream):
        return next(iter(DataLoader(_Head(dataset.dataset, size), batch_size=size, **how)))
    indices = [i * len(dataset) // size for i in range(size)]
    return next(iter(DataLoader(dataset, batch_sampler=[indices], **how)))


class _Head(IterableDataset[Any]):
    """The first samples of a stream."""

    def __init__(self, dataset: IterableDataset[Any], size: int) -> None:
        self.dataset = dataset
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        stream: Any = iter(self.dataset)
        if stream is self.dataset:
            raise ValueError(
                f'speeds="measure" would use up samples of {type(self.dataset).__name__}, which can be iterated only'
                " once: give HeterogeneousBatches speeds=[...], or let its __iter__ begin anew"
            )
        yield from islice(stream, self.size)


@contextmanager
def _replaced(owner: object, **attributes: Any) -> Iterator[None]:
    """Shadow methods of an object."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(before)


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Put back the tensors and plain attributes of a module and its children."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    seen: set[int] = set()
    put_back = [_remember(vars(child), seen) for child in module.modules()]
    try:
        yield
    finally:
        for restore in put_back:
            restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _remember(value: Any, seen: set[int]) -> Callable[[], object]:
    """A function that puts back what is in ``value`` now, down through containers."""
    if id(value) in seen or not isinstance(value, Tensor | dict | list | deque | set):
        return lambda: None
    seen.add(id(value))
    if isinstance(value, Tensor):
        content = value.detach().clone()

        def write() -> None:
            if not torch.equal(value, content):  # autograd would take a parameter that is written for a changed one
                with torch.no_grad():
                    value.copy_(content)

        return write
    before = copy.copy(value)
    inside = before.values() if isinstance(before, dict) else before
    put_back = [_remember(item, seen) for item in islice(inside, _LARGEST_CONTAINER)]

    def refill() -> None:
        value.clear()
        value.update(before) if isinstance(value, dict | set) else value.extend(before)
        for restore in put_back:
            restore()

    return refill


@contextmanager
def _restored_optimization(trainer: pl.Trainer) -> Iterator[None]:
    """Put back learning rates and schedulers, which manual optimization may step."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    before = [{name: copy.copy(value) for name, value in group.items() if name != "params"} for group in groups]
    # with automatic optimization nobody steps them, and not every scheduler can be loaded
    manual = not trainer.lightning_module.automatic_optimization
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs] if manual else []
    states = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
    try:
        yield
    finally:
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        for group, values in zip(groups, before, strict=True):
            group.update(values)


@contextmanager
def _isolated_generators(datasets: Sequence[Any]) -> Iterator[None]:
    """Put back the global random generators, and those that datasets hold."""
    put_back = [_remember_generator(generator) for dataset in datasets for generator in _generators(dataset)]
    with isolate_rng():
        try:
            yield
        finally:
            for restore in put_back:
                restore()


def _generators(value: Any, depth: int = 4) -> Iterator[Any]:
    """Random generators within a few attributes' or containers' reach."""
    if isinstance(value, torch.Generator | random.Random) or hasattr(value, "bit_generator"):
        yield value
    elif depth:
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
            inside = vars(value).values()
        for item in islice(inside, 1000):
            yield from _generators(item, depth - 1)


def _remember_generator(generator: Any) -> Callable[[], object]:
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return lambda: generator.set_state(state)
    if isinstance(generator, random.Random):
        own_state = generator.getstate()
        return lambda: generator.setstate(own_state)
    numpy_state = generator.bit_generator.state
    return lambda: setattr(generator.bit_generator, "state", numpy_state)
