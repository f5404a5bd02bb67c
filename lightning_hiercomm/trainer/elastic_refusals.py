"""Checks of programs for what elastic runs do not support, each with what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_hiercomm._lightning.trainer import names_logged_in_training
from lightning_hiercomm._lightning.tree import pl
from lightning_hiercomm.elastic.configuration import check_torchft
from lightning_hiercomm.nodes.ignored import ignored_by_ddp
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.training_run import TrainingRun

Check = tuple[Callable[[Any], bool], str]

_CALLBACKS: tuple[Check, ...] = (
    (
        lambda callback: (
            isinstance(callback, pl.callbacks.StochasticWeightAveraging)
            or _is_of(callback, "WeightAveraging")  # not in all versions
        ),
        "{name} averages on each node separately: leave it out",
    ),
    (
        lambda callback: (
            isinstance(callback, pl.callbacks.ModelCheckpoint) and callback._train_time_interval is not None
        ),
        "{name}(train_time_interval=...) saves at another step on every node: use every_n_train_steps or"
        " every_n_epochs",
    ),
    (
        lambda callback: isinstance(callback, pl.callbacks.ModelCheckpoint) and callback.save_last == "link",
        "{name}(save_last='link') links on every node, and only one writes: use save_last=True",
    ),
    (
        lambda callback: isinstance(callback, pl.callbacks.Timer),
        "{name}, or Trainer(max_time=...), ends training at another batch on every node: use max_steps or max_epochs",
    ),
    (
        lambda callback: _is_of(callback, "RayTrainReportCallback"),  # of an extra
        "{name} waits for a report of every worker, also of lost ones, and only one node writes checkpoints: use"
        " ModelCheckpoint with a folder that all nodes share, and fit(ckpt_path='last')",
    ),
    (
        lambda callback: isinstance(callback, pl.callbacks.LearningRateFinder),
        "{name}, and Tuner.lr_find, which uses it, try rates on one node, and restore a file that one node writes: find"
        " a rate without elastic=",
    ),
)

_TRAINER: tuple[Check, ...] = (
    (
        lambda trainer: bool(ignored_by_ddp(trainer.lightning_module)),
        "the module tells DDP to leave parameters or buffers to each rank (_ddp_params_and_buffers_to_ignore), but a"
        " joining node begins with another node's: leave the attribute or elastic= out",
    ),
)


def check_trainer(trainer: pl.Trainer) -> None:
    """Raise a ``ValueError`` for the first setting or callback of the Trainer that elastic runs do not support."""
    check_torchft()
    _refuse(_TRAINER, trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        _refuse(_CALLBACKS, callback)


def check_one_node(topology: Topology) -> None:
    """Raise a ``ValueError`` if the ranks that were started together are several nodes."""
    if topology.num_nodes > 1:
        raise ValueError(
            f"elastic nodes: every node is a world of its own, but this one has {topology.num_nodes} nodes: start each"
            " node with `torchrun --nnodes=1`"
        )


def check_first_values(run: TrainingRun) -> None:
    """Raise a ``ValueError`` if parameters have changed since the nodes synchronized their first values."""
    if run.values_have_changed(of_trained=True):
        raise ValueError(
            "elastic nodes: parameters were changed in on_fit_start or on_train_start, after the nodes had"
            " synchronized their first values, so other nodes do not receive them. Change them in configure_model"
            " or setup"
        )


def check_monitors(trainer: pl.Trainer) -> None:
    """Raise a ``ValueError`` if a callback or scheduler monitors what training logs, which is different on every node.

    Whole numbers pass: programs log steps and epochs to keep the last checkpoints.
    """
    logged = names_logged_in_training(trainer)
    for user, monitor in _monitors(trainer):
        value = trainer.callback_metrics.get(monitor) if monitor in logged else None
        if value is not None and not float(value).is_integer():
            raise ValueError(
                f"elastic nodes: {user} monitors {monitor!r}, which is logged in training, where sync_dist=True gives"
                " every node the mean over its own ranks, and nodes would decide differently: monitor what validation"
                " logs"
            )


def _is_of(callback: pl.Callback, name: str) -> bool:
    """Return whether a callback is of a class of this name, which may not be installed."""
    return any(each.__name__ == name for each in type(callback).__mro__)


def _refuse(checks: tuple[Check, ...], value: Any) -> None:
    for applies, message in checks:
        if applies(value):
            raise ValueError(f"elastic nodes: {message.format(name=type(value).__name__)}")


def _monitors(trainer: pl.Trainer) -> Iterator[tuple[str, str]]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if (
            isinstance(callback, (pl.callbacks.ModelCheckpoint, pl.callbacks.EarlyStopping))
            and callback.monitor is not None
        ):
            yield type(callback).__name__, callback.monitor
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor is not None:
            yield type(config.scheduler).__name__, config.monitor
