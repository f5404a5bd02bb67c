"""Finds averages of weights in the private attributes of callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_hiercomm.nodes.buffers import is_of_numbers

_OF_AVERAGED_MODEL = "module."


@torch.no_grad()
def heal_averages(trainer: pl.Trainer) -> list[tuple[Tensor, Tensor]]:
    """Restart non-finite averages of a module's weights from the weights that it holds.

    A callback that has averaged non-finite weights keeps non-finite averages forever, and no hook resets them. Its
    averages are found by the names of their tensors, in a copy of the module or in a dictionary, as in torch's
    ``AveragedModel`` and Lightning's ``WeightAveraging``.

    Returns:
        These averages, each with its previous values.
    """
    replaced: list[tuple[Tensor, Tensor]] = []
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
                    replaced.append((average, average.clone()))
                    average.copy_(value)
    return replaced


def _named_tensors(held: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(held, nn.Module):
        yield from held.named_parameters()
        yield from held.named_buffers()
    elif isinstance(held, Mapping):
        for name, value in held.items():
            if isinstance(name, str) and isinstance(value, Tensor):
                yield name, value
