"""Checks of programs for what elastic runs do not support, each with what to use instead."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_hiercomm._lightning.trainer import names_logged_in_training
from lightning_hiercomm._lightning.tree import pl
from lightning_hiercomm.elastic.configuration import check_torchft
from lightning_hiercomm.nodes.ignored import ignored_by_ddp
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.training_run import TrainingRun

_AVERAGES = "averages on each node separately: leave it out"
_CALLBACKS = {
    "StochasticWeightAveraging": _AVERAGES,
    "WeightAveraging": _AVERAGES,
    "Timer": (
        "(Trainer(max_time=...) adds one) ends training at another batch on every node: use max_steps or max_epochs"
    ),
    "RayTrainReportCallback": (
        "waits for a report of every worker, also of lost ones, and only one node writes checkpoints: use"
        " ModelCheckpoint with a folder that all nodes share, and fit(ckpt_path='last')"
    ),
    "LearningRateFinder": (
        "(Tuner.lr_find uses it) tries rates on one node, and restores a file that one node writes: find a rate without"
        " elastic="
    ),
}
"""Why a callback of this class, which may not be installed, is refused."""
_PACKAGES = ("lightning", "pytorch_lightning", "ray")  # a user's own class may have one of these names


def check_trainer(trainer: pl.Trainer) -> None:
    """Raise a ``ValueError`` for the first setting or callback of the Trainer that elastic runs do not support."""
    check_torchft()
    if ignored_by_ddp(trainer.lightning_module):
        raise ValueError(
            "elastic nodes: the module tells DDP to leave parameters or buffers to each rank"
            " (_ddp_params_and_buffers_to_ignore), but a joining node begins with another node's: leave the attribute"
            " or elastic= out"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        known = [each for each in type(callback).__mro__ if each.__module__.partition(".")[0] in _PACKAGES]
        reasons = [_CALLBACKS[each.__name__] for each in known if each.__name__ in _CALLBACKS]
        if isinstance(callback, pl.callbacks.ModelCheckpoint):
            if callback._train_time_interval is not None:
                reasons.append(
                    "with train_time_interval saves at another step on every node: use every_n_train_steps or"
                    " every_n_epochs"
                )
            if callback.save_last == "link":
                reasons.append("with save_last='link' links on every node, and only one writes: use save_last=True")
        if reasons:
            raise ValueError(f"elastic nodes: {type(callback).__name__} {reasons[0]}")


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
