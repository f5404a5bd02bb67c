"""Nodes that leave and join, in a Trainer: when one joins, where it takes up training, and which data it sees."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from lightning_hiercomm._lightning.healing import (
    begin_as,
    draw_train_data_anew,
    draw_train_data_once,
    end_training,
    skip_sanity_check,
    state_of,
    take_state,
    tell_stage_of_dataloaders,
)
from lightning_hiercomm._lightning.saves import number_names_as_ever, number_names_by_own_files
from lightning_hiercomm._lightning.trainer import (
    names_logged_in_training,
    prepare_train_dataloaders_again,
    validates_by_the_clock,
)
from lightning_hiercomm.checkpoints.companion import random_state, set_random_state
from lightning_hiercomm.checkpoints.plain import Checkpoints
from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.elastic.configuration import check_torchft
from lightning_hiercomm.elastic.groups import GlooTransport
from lightning_hiercomm.elastic.lighthouse import TorchftLighthouse, own_address
from lightning_hiercomm.elastic.membership import ElasticHistory, Membership, has_ended_here
from lightning_hiercomm.elastic.quorum import SIGTERM_EXIT_CODE, Member
from lightning_hiercomm.elastic.signature import Signer
from lightning_hiercomm.elastic.topology import ElasticTopology
from lightning_hiercomm.elastic.transaction import Transaction
from lightning_hiercomm.run.replicas import broadcast_values, tensors_without
from lightning_hiercomm.run.training_run import TrainingRun


class ElasticNode:
    """This node's part in a run whose nodes come and go, from the setup of a ``fit`` to its teardown.

    Args:
        elastic: As the user configured it.
        checkpoints: Adds to a state what the schemes need of it, and takes it.
        told_to_leave: What ends training while the node waits for others, if this rank was told to leave; or None.
    """

    def __init__(
        self,
        elastic: Elastic,
        checkpoints: Checkpoints,
        told_to_leave: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self._told_to_leave = told_to_leave
        self._elastic = elastic
        self._checkpoints = checkpoints
        self._membership: Membership | None = None
        self._transaction: Transaction | None = None
        self._history: ElasticHistory | None = None
        self._topology: ElasticTopology | None = None
        self._run: TrainingRun | None = None
        self._healed_by: dict[str, Any] | None = None  # the state, until training starts
        self._draws_from: tuple[str, dict[str, Any]] | None = None  # from that moment on, where others' streams were
        self._is_in_epoch = False  # since it was healed
        self._has_data = False
        self._stage: list[RunningStage | None] = [None]
        self._store: Store | None = None
        self._has_given_up = False
        self._was_told_to_leave = False

    # ---- joining -------------------------------------------------------------------------------------------------

    def join(self, trainer: pl.Trainer, topology: ElasticTopology, run: TrainingRun) -> None:
        """Come to the others, and go on from their state, or begin with them; collective over the node."""
        self._check(trainer)
        self._topology, self._run = topology, run
        is_first = topology.local_rank == 0
        lighthouse = None
        address = self._elastic.address()
        host = os.environ.get("HIERCOMM_ADDRESS") or _address_towards(address)
        signer = Signer(os.environ.get("HIERCOMM_TOKEN", ""))
        transport = GlooTransport(host, self._elastic.dead_after, signer)
        if is_first:
            lighthouse = TorchftLighthouse(address, self._elastic.dead_after)
            self._store = _own_store(host)
        port = self._store.port if isinstance(self._store, TCPStore) else 0
        me = Member(
            node=os.environ.get("HIERCOMM_NODE") or socket.gethostname(),
            replica_id="",
            run=f"{os.environ.get('HIERCOMM_RUN', '')}:{run.fingerprint()}",
            ranks=topology.ranks_on_node,
            store=f"{host}:{port}",
            checkpoint_step=_steps_of_checkpoint(trainer),
            restarts=_restarts(),
        )
        self._membership = Membership(
            me,
            self._elastic,
            topology,
            lighthouse,
            transport,
            self._store,
            self._before_change,
            signer,
            self._told_to_leave,
            run.replicas.device,
        )
        self._history = self._membership.history
        batches = trainer.fit_loop.epoch_loop.batch_progress
        self._transaction = Transaction(
            self._membership, topology, self._undo_point, self._position, lambda: batches.total.ready, self._settle
        )
        tell_stage_of_dataloaders(
            trainer,
            self._stage,
            lambda: trainer.fit_loop.epoch_loop.batch_progress.current.ready if self._is_in_epoch else 0,
        )
        number_names_by_own_files(trainer)
        draw_train_data_anew(trainer, lambda: self._divides_data(trainer, batches.total.ready))
        while True:
            quorum = self._transaction.begin(self._begin_equal, admits=True)
            if quorum is not None:
                source = quorum.source_of(self._membership.me.replica_id)
                assert source is not None
                state = self._membership.heal(source)
                if state is None:
                    continue
                self._checkpoints.take(take_state(trainer, state), None, None)
                run.replicas.slots = state["slots"]
                self._healed_by = state
                self._is_in_epoch = state["moment"] == "batch"
            run.begin_from_module()
            run.remember_values()
            topology.agree_by(self._transaction)
            return

    def _divides_data(self, trainer: pl.Trainer, batches: int) -> bool:
        """Whether this node takes other shares of the data from now on, before an epoch."""
        is_first, self._has_data = not self._has_data, True
        if self._is_in_epoch or self._membership is None:
            return is_first  # or there are loaders already, if `estimated_stepping_batches` was asked for
        return self._membership.begin_epoch(batches) or is_first

    def _begin_equal(self) -> None:
        replicas, topology = self._required_run.replicas, self._topology
        assert topology is not None
        replicas.compare_shapes(topology.world, ())
        broadcast_values(tensors_without(replicas.module, replicas.per_rank), topology.world)

    def _before_change(self) -> Callable[[], None]:
        go_on = [scheme.before_nodes_change() for scheme in self._required_run.schemes]

        def all_go_on() -> None:
            for each in go_on:
                each()

        return all_go_on

    def _undo_point(self) -> Callable[[], None]:
        undo = [scheme.undo_point() for scheme in self._required_run.schemes]

        def undo_all() -> None:
            for each in undo:
                each()
            self._required_run.replicas.have_written()

        return undo_all

    def _settle(self) -> None:
        for scheme in self._required_run.schemes:
            scheme.settle()

    def _position(self) -> str:
        """Nodes that train other parameters than most would exchange tensors of other sizes."""
        of_each = [(s.state.steps, sum(p.numel() for p in s.replica.parameters)) for s in self._required_run.schemes]
        return "after " + ", ".join(f"{steps} optimizer steps of {trained} elements" for steps, trained in of_each)

    def _check(self, trainer: pl.Trainer) -> None:
        check_torchft()
        if validates_by_the_clock(trainer):
            raise ValueError(
                "elastic nodes: Trainer(val_check_interval=...) of a time validates at another step on every node: give"
                " a number of batches, or a share of the epoch"
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if (reason := _refused(callback)) is not None:
                raise ValueError(f"elastic nodes: {reason}")

    def check_monitors(self, trainer: pl.Trainer) -> None:
        """See that nobody decides by what is this node's own.

        Whole numbers pass: programs log steps and epochs to keep the last checkpoints.

        Raises:
            ValueError: If somebody monitors what training's hooks have logged.
        """
        own = names_logged_in_training(trainer)
        for who, monitor in _monitors(trainer):
            value = trainer.callback_metrics.get(monitor) if monitor in own else None
            if value is not None and not float(value).is_integer():
                raise ValueError(
                    f"elastic nodes: {who} monitors {monitor!r}, which is logged in training, where sync_dist=True"
                    " gives every node the mean over its own ranks, and nodes would decide differently: monitor what"
                    " validation logs"
                )

    # ---- healing others ------------------------------------------------------------------------------------------

    def at_boundary(self, trainer: pl.Trainer, moment: str) -> None:
        """Training is between two batches: give newcomers that wait for this node where it is."""
        membership, run = self._membership, self._run
        if membership is None or run is None:
            return
        if self._draws_from is not None and self._draws_from[0] == moment:
            set_random_state(self._draws_from[1])  # not before: datasets may be cut by what the program has seeded
            self._draws_from = None
        if run.topology.ranks_on_node == 1:  # others on the node would wait for the first rank
            membership.end_if_behind()
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        if moment == "batch" and done % trainer.accumulate_grad_batches:
            return  # gradients are being accumulated, which no state holds; before a step, when that is over
        if not membership.healing.is_expected:
            return

        def state() -> dict[str, Any] | None:
            if not all(scheme.is_synchronized or scheme.config.requirements.begins_with_copy for scheme in run.schemes):
                return None  # a step was taken since: this node's parameters are its own by now
            with run.averaged_model.nobody_asked():
                whole = state_of(trainer, moment)
            self._checkpoints.add_to(whole["checkpoint"], run, None, together=False, is_own=True)
            return {**whole, "random": random_state(), "slots": run.replicas.slots}

        membership.give_state(state)

    def begin_training(self, trainer: pl.Trainer) -> None:
        """Training starts: a healed node's loops begin where the others' are."""
        if self._healed_by is not None:
            begin_as(trainer, self._healed_by)
            self._draws_from = self._healed_by["moment"], self._healed_by["random"]
        self._healed_by = None

    def end_training(self, trainer: pl.Trainer) -> None:
        """The run is over, and all nodes are equal."""
        self.at_boundary(trainer, "end")

    def end_epoch(self) -> None:
        """The epoch in which this node was healed, at the latest, is over."""
        self._is_in_epoch = False

    def go_on(self, trainer: pl.Trainer) -> None:
        """A healed node's loops are restored: others have seen that it can validate, and perhaps ended the training."""
        if self._healed_by is not None:
            skip_sanity_check(trainer)  # which may be an agreement, to which nobody else would come
            if self._healed_by["moment"] == "end":
                end_training(trainer)

    # ---- what others ask -----------------------------------------------------------------------------------------

    @property
    def writes(self) -> bool:
        """Whether this node writes the checkpoints of all; not its own parameters in their place, when it leaves."""
        if self._membership is None:
            return True
        return self._membership.leads and not (self._has_given_up and self._has_others)

    def sampler_arguments(self, ranks: int, rank: int) -> dict[str, int]:
        """Which share of the data this rank sees: while training its own among all nodes', otherwise of its node's."""
        me = None if self._membership is None else self._membership.me
        if me is None or not me.shards or self._stage[0] not in (None, RunningStage.TRAINING):
            return {"num_replicas": ranks, "rank": rank}
        return {"num_replicas": me.num_shards, "rank": me.shards[rank]}

    def scalars(self) -> dict[str, float]:
        """For loggers."""
        return {} if self._history is None else self._history.scalars()

    def history(self) -> list[str]:
        """Who came and went, in words."""
        return [] if self._history is None else self._history.lines()

    def note_exception(self, exception: BaseException) -> None:
        """Training ends by it."""
        if isinstance(exception, SIGTERMException):
            self._was_told_to_leave = True
            exception.code = exception.code or SIGTERM_EXIT_CODE
        self.give_up()

    def give_up(self) -> None:
        """Something went wrong: nothing more is agreed on, for the others are not where this node is."""
        self._has_given_up = True
        if self._topology is not None:
            self._topology.agree_by(None)

    def leave_others(self) -> None:
        """This node is about to be queued again: others, if there are any, have the run's state, and go on."""
        if self._has_others:
            self.give_up()

    def leave(self, trainer: pl.Trainer | None, at_once: bool) -> None:
        """The ``fit`` is over, or has failed."""
        membership, self._membership = self._membership, None
        self.give_up()
        if membership is not None:
            membership.leave(at_once=at_once and not self._was_told_to_leave, is_over=not at_once)
        if trainer is not None:
            prepare_train_dataloaders_again(trainer)
            draw_train_data_once(trainer)
            number_names_as_ever(trainer)
        self._store = self._transaction = None  # which hold what others were to find here

    @property
    def _has_others(self) -> bool:
        return self._history is not None and self._history.nodes > 1

    @property
    def _required_run(self) -> TrainingRun:
        assert self._run is not None
        return self._run


class BoundaryCallback(pl.Callback):
    """Tells a node when training is between two batches; it comes before the user's callbacks."""

    def __init__(self, node: ElasticNode) -> None:
        self._node = node

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An epoch starts."""
        self._node.at_boundary(trainer, "epoch")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A batch starts."""
        self._node.at_boundary(trainer, "batch" if batch_idx else "epoch")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch ends; checkpoints may come."""
        self._node.check_monitors(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """An epoch ends."""
        self._node.check_monitors(trainer)
        self._node.end_epoch()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The run is over, and all nodes are equal."""
        self._node.end_training(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The run fails, or stops."""
        self._node.note_exception(exception)


def _refused(callback: pl.Callback) -> str | None:
    """Why nodes that come and go cannot have this callback, and what to take."""
    name = type(callback).__name__
    averages = any(each.__name__ == "WeightAveraging" for each in type(callback).__mro__)  # not in all versions
    if averages or isinstance(callback, StochasticWeightAveraging):
        return f"{name} averages on each node by itself, and nobody agrees on that: leave it out"
    if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
        return (
            f"{name}(train_time_interval=...) saves at another step on every node: take every_n_train_steps or"
            " every_n_epochs"
        )
    if isinstance(callback, ModelCheckpoint) and callback.save_last == "link":
        return f"{name}(save_last='link') links on every node, and only one writes: take save_last=True"
    if isinstance(callback, Timer):
        return (
            f"{name}, or Trainer(max_time=...), ends training at another batch on every node: take max_steps or"
            " max_epochs"
        )
    if isinstance(callback, LearningRateFinder):
        return (
            f"{name}, and Tuner.lr_find, which uses it, try rates out on one node, and restore a file that one node"
            " writes: find a rate without elastic=, and give that"
        )
    return None


def _monitors(trainer: pl.Trainer) -> Iterator[tuple[str, str]]:
    """Who decides by which metric."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (ModelCheckpoint, EarlyStopping)) and callback.monitor is not None:
            yield type(callback).__name__, callback.monitor
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor is not None:
            yield type(config.scheduler).__name__, config.monitor


def _address_towards(lighthouse: str) -> str:
    try:
        return own_address(lighthouse)
    except OSError as error:
        raise ValueError(
            f"elastic nodes: this machine knows no way to the lighthouse at {lighthouse!r} ({error}): see what"
            " HIERCOMM_LIGHTHOUSE, or elastic=, names"
        ) from error


def _own_store(host: str) -> TCPStore:
    try:
        return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    except RuntimeError as error:
        raise RuntimeError(
            f"elastic nodes: this node does not reach itself at {host} ({str(error).splitlines()[0]}): set"
            " HIERCOMM_ADDRESS to the address of one of its interfaces that other nodes reach"
        ) from error


def _steps_of_checkpoint(trainer: pl.Trainer) -> int:
    return int(trainer._checkpoint_connector._loaded_checkpoint.get("global_step", 0))


def _restarts() -> int:
    """How often torchrun has started this node again, in the run that it comes to; a program may fit once more."""
    return 0 if has_ended_here() else int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
