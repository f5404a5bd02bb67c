"""Fits on ranks that are running already: alone, with a resume, or to see how they end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from problems import SaveAfter, one_trainer, warnings_with

from lightning_hiercomm import HierarchicalStrategy

our_warnings = partial(warnings_with, "", "/lightning_hiercomm/")
"""Collects the messages of warnings that come from the package."""
Module = TypeVar("Module", bound=pl.LightningModule)
_OF_DDP = {"find_unused_parameters", "static_graph", "broadcast_buffers"}
_OF_STRATEGY = {*inspect.signature(HierarchicalStrategy).parameters} - {"kwargs"} | _OF_DDP


def of_strategy(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the strategy's arguments out of those of a fit."""
    return {name: arguments.pop(name) for name in _OF_STRATEGY & arguments.keys()}


def fit_here(
    folder: Path, module: pl.LightningModule, scheme: Any = "periodic", ckpt_path: Any = None, **arguments: Any
) -> pl.Trainer:
    """Fit under a scheme, on two nodes of one rank by default; ``arguments`` are the strategy's and the Trainer's."""
    strategy = HierarchicalStrategy(scheme, **{"ranks_per_node": 1, **of_strategy(arguments)})
    trainer = one_trainer(folder, strategy=strategy, **{"devices": 2, **arguments})
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def whole_and_resumed(
    folder: Path,
    make: Callable[[], Module],
    scheme: Any = "periodic",
    *,
    after: int,
    callbacks: Callable[[], Sequence[pl.Callback]] = list,
    **arguments: Any,
) -> tuple[Module, Module]:
    """Fit a module with per-rank shards and save after some steps; fit another one from there on."""
    path, whole, resumed = folder / "whole.ckpt", make(), make()
    arguments = {"checkpoint_replicas": True, **arguments}
    fit_here(folder, whole, scheme, callbacks=[*callbacks(), SaveAfter(after, path)], **arguments)
    fit_here(folder, resumed, scheme, path, callbacks=[*callbacks()], **arguments)
    return whole, resumed


def outcome(folder: Path, module: pl.LightningModule, scheme: Any, ranks_per_node: int = 1, **arguments: Any) -> Any:
    """How a fit ends on this rank: its error, or an empty string; our warnings; and the weights."""
    error = ""
    with our_warnings() as said:
        try:
            fit_here(folder, module, scheme, ranks_per_node=ranks_per_node, **arguments)
        except Exception as raised:
            error = str(raised)
    return error, said, weights_of(module)


def weights_of(module: torch.nn.Module) -> list[float]:
    """Return all parameters, flat."""
    flat: list[float] = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    return flat


def outcomes(borrow: Any, fits: Mapping[str, Any], ranks: int = 2) -> Iterator[tuple[str, list[Any]]]:
    """Of each fit, its name and how it ends on every rank; ``fits`` are arguments of :func:`outcome` by name."""
    reports = borrow(lambda folder: [outcome(folder, *arguments) for arguments in fits.values()], ranks=ranks)
    yield from ((name, [report[place] for report in reports]) for place, name in enumerate(fits))
