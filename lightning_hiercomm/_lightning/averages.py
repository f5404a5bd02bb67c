"""Averages of weights that callbacks keep, in attributes that nobody but their authors knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_hiercomm.nodes.buffers import is_of_numbers

_OF_AVERAGED_MODEL = "module."


@torch.no_grad()
def heal_averages(trainer: pl.Trainer) -> list[tuple[Tensor, Tensor]]:
    """Let averages of a module's weights that are NaN or infinite begin anew from the weights that it holds.

    A callback that averages the weights after every batch saw those of a rank that was sick, and never gets rid of
    them; there is no hook to tell it. Its averages are found by their names: those in a copy of the module or in a
    dictionary, ``AveragedModel`` and Lightning's ``WeightAveraging`` among them.

    Returns:
        Those averages, and what they held.
    """
    sick: list[tuple[Tensor, Tensor]] = []
    module = trainer.lightning_module
    weights = dict([*module.named_parameters(), *module.named_buffers()])
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set, but not declared
        for held in vars(callback).values():
            if held is module:
                continue
            for name, average in _named_tensors(held):
                value = weights.get(name.removeprefix(_OF_AVERAGED_MODEL))
                if value is None or value is average or value.shape != average.shape:
                    continue
                if is_of_numbers(average) and not average.isfinite().all():
                    sick.append((average, average.clone()))
                    average.copy_(value)
    return sick


def _named_tensors(held: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(held, nn.Module):
        yield from held.named_parameters()
        yield from held.named_buffers()
    elif isinstance(held, Mapping):
        for name, value in held.items():
            if isinstance(name, str) and isinstance(value, Tensor):
                yield name, value
