"""An elastic node in a Trainer: it joins, recovers, trains on its part of the data, and leaves."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from lightning_hiercomm._lightning.saves import number_names_by_own_files
from lightning_hiercomm._lightning.state_transfer import (
    begin_as,
    end_training,
    note_stage_of_dataloaders,
    reload_train_data_when_due,
    skip_sanity_check,
    state_of,
    take_state,
)
from lightning_hiercomm._lightning.tree import pl
from lightning_hiercomm.checkpoints.plain import Checkpoints
from lightning_hiercomm.checkpoints.sidecar import random_state, set_random_state
from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.elastic.lighthouse import TorchftLighthouse, own_address
from lightning_hiercomm.elastic.membership import Membership
from lightning_hiercomm.elastic.quorum import MUST_NOT_BEGIN, SIGTERM_EXIT_CODE, Request
from lightning_hiercomm.elastic.rendezvous import has_ended_here
from lightning_hiercomm.elastic.surroundings import Surroundings
from lightning_hiercomm.elastic.topology import ElasticTopology
from lightning_hiercomm.elastic.transaction import Transaction
from lightning_hiercomm.elastic.transport import GlooTransport
from lightning_hiercomm.run.replicas import broadcast_values, tensors_without
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.trainer.elastic_refusals import check_monitors


class ElasticNode(pl.Callback):
    """This node in an elastic run, from the setup of a ``fit`` to its teardown; the user's callbacks come later.

    It is the :class:`~lightning_hiercomm.elastic.surroundings.Participant` of the node's transaction.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        run: TrainingRun,
        membership: Membership,
        checkpoints: Checkpoints,
        leaves_by: Callable[[], BaseException | None],
    ) -> None:
        self.membership = membership
        self.leaves_by = leaves_by
        self._trainer = trainer
        self._run = run
        self._checkpoints = checkpoints
        self._recovered: dict[str, Any] | None = None  # the state, until training starts
        self._random: tuple[str, dict[str, Any]] | None = None  # the source's random state, and when to take it
        self._is_in_epoch = False  # in which it recovered
        self._has_data = False
        self._stage: list[pl.trainer.states.RunningStage | None] = [None]  # for which Lightning prepares a dataloader
        self._has_given_up = self._has_left = self._received_sigterm = False

    # ---- joining -------------------------------------------------------------------------------------------------

    def join(self, topology: ElasticTopology) -> None:
        """Begin training with the other nodes, or recover from one of them; collective over the node."""
        trainer, run, transaction = self._trainer, self._run, Transaction(self.membership, self)
        progress = trainer.fit_loop.epoch_loop.batch_progress
        note_stage_of_dataloaders(trainer, self._stage, lambda: progress.current.ready if self._is_in_epoch else 0)
        number_names_by_own_files(trainer)
        reload_train_data_when_due(trainer, self._begin_epoch)
        state = transaction.begin(self._begin_equal, admits=True)
        if state is not None:
            self._checkpoints.take(take_state(trainer, state), None)
            run.replicas.slots = state["slots"]
            self._recovered = state
            self._is_in_epoch = state["moment"] == "batch"
        run.begin_from_module()
        run.remember_values()
        topology.transaction = transaction

    def _begin_epoch(self) -> bool:
        """Partition the data again before an epoch; return whether the dataloaders have to be made again."""
        is_first, self._has_data = not self._has_data, True
        if self._is_in_epoch or self._has_left:
            return is_first  # there are dataloaders already if `estimated_stepping_batches` was used
        return self.membership.shards.begin_epoch() or is_first

    def _begin_equal(self) -> None:
        replicas, world = self._run.replicas, self._run.topology.world
        broadcast_values(tensors_without(replicas.module, replicas.own_tensors(world)), world)

    # ---- taking part ---------------------------------------------------------------------------------------------

    def position(self) -> str:  # to exchange tensors of other sizes would end processes
        counts = [(scheme.state.steps, scheme.replica.numel) for scheme in self._run.schemes]
        return "after " + ", ".join(f"{steps} optimizer steps of {count} elements" for steps, count in counts)

    def before_change(self) -> Callable[[], None]:
        return _in_turn([scheme.before_nodes_change() for scheme in self._run.schemes])

    def undo_point(self) -> Callable[[], None]:
        run = self._run
        of_schemes = [undo for each in run.schemes for undo in (each.state.undo_point(), each.replica.undo_point())]
        return _in_turn([*of_schemes, run.replicas.have_written])

    # ---- training ------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at_boundary("epoch")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.at_boundary("batch" if batch_idx else "epoch")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        check_monitors(trainer)  # before checkpoints are saved

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_monitors(trainer)
        self._is_in_epoch = False

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at_boundary("end")

    def at_boundary(self, moment: str) -> None:
        """Send this node's state to nodes that wait for it, between two batches."""
        trainer, run, membership = self._trainer, self._run, self.membership
        if self._has_left:
            return
        if self._random is not None and self._random[0] == moment:
            set_random_state(self._random[1])  # only now: the program may seed itself to split its datasets
            self._random = None
        if run.topology.ranks_on_node == 1:  # other ranks of the node would wait for the first one
            membership.rendezvous.end_if_behind()
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        if moment == "batch" and done % trainer.accumulate_grad_batches:
            return  # no state contains accumulated gradients
        if membership.healing.is_expected:
            membership.give_state(lambda: self._state(moment))

    def _state(self, moment: str) -> dict[str, Any] | None:
        run = self._run
        if not all(each.state.is_synchronized or each.config.requirements.begins_with_copy for each in run.schemes):
            return None  # a step was taken since: this node's parameters are its own
        with run.averaged_model.own_as_averaged():
            whole = state_of(self._trainer, moment)
        self._checkpoints.add_to(whole["checkpoint"], run, None, together=False, is_own=True)
        return {**whole, "random": random_state(), "slots": run.replicas.slots}

    def begin_training(self) -> None:
        """Start a recovered node's loops at the batch of its source."""
        if self._recovered is not None:
            begin_as(self._trainer, self._recovered)
            self._random = self._recovered["moment"], self._recovered["random"]
        self._recovered = None

    def prepare_loops(self) -> None:
        """Prepare a recovered node's loops, once they are restored."""
        if self._recovered is not None:
            skip_sanity_check(self._trainer)  # it may synchronize, and no other node takes part
            if self._recovered["moment"] == "end":
                end_training(self._trainer)

    # ---- checkpoints and data ------------------------------------------------------------------------------------

    @property
    def writes(self) -> bool:
        """Whether this node writes the checkpoints of all; not while it leaves with parameters of its own."""
        return self._has_left or (self.membership.leads and not (self._has_given_up and self._has_others))

    @property
    def _has_others(self) -> bool:
        return self.membership.history.nodes > 1

    def sampler_arguments(self, ranks: int, rank: int) -> dict[str, int]:
        """Return this rank's shard of all nodes' data in training, otherwise that of its node's."""
        total, shards = self.membership.shards.own()
        if self._has_left or not shards or self._stage[0] not in (None, pl.trainer.states.RunningStage.TRAINING):
            return {"num_replicas": ranks, "rank": rank}
        return {"num_replicas": total, "rank": shards[rank]}

    # ---- leaving -------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, pl.utilities.exceptions.SIGTERMException):
            self._received_sigterm = True
            exception.code = exception.code or SIGTERM_EXIT_CODE
        self.give_up()

    def give_up(self) -> None:
        self._has_given_up = True
        topology = self._run.topology
        assert isinstance(topology, ElasticTopology)
        topology.transaction = None

    def leave_others(self) -> None:
        """Stop synchronizing before this node is queued again, unless it is the only one."""
        if self._has_others:
            self.give_up()

    def leave(self, at_once: bool) -> None:
        if self._has_left:
            return
        self._has_left = True
        self.give_up()
        self.membership.leave(at_once=at_once and not self._received_sigterm, is_over=not at_once)


def elastic_node(
    trainer: pl.Trainer,
    elastic: Elastic,
    topology: ElasticTopology,
    run: TrainingRun,
    checkpoints: Checkpoints,
    leaves_by: Callable[[], BaseException | None],
) -> ElasticNode:
    """Connect to the lighthouse, and return an :class:`ElasticNode`; for ``leaves_by`` see ``Participant``."""
    address = elastic.address()
    host = os.environ.get("HIERCOMM_ADDRESS") or _address_towards(address)
    is_first = topology.local_rank == 0
    store = _own_store(host) if is_first else None
    lighthouse = TorchftLighthouse(address, elastic.dead_after) if is_first else None
    step = int(trainer._checkpoint_connector._loaded_checkpoint.get("global_step", 0))
    me = Request(
        node=os.environ.get("HIERCOMM_NODE") or socket.gethostname(),
        replica_id="",
        run=f"{os.environ.get('HIERCOMM_RUN', '')}:{_fingerprint(run)}",
        ranks=topology.ranks_on_node,
        store=f"{host}:{store.port if store is not None else 0}",
        begins_at=step or (MUST_NOT_BEGIN if was_restarted() else 0),
    )
    transport = GlooTransport(host, elastic.dead_after)
    around = Surroundings(elastic, topology, lighthouse, transport, store)
    return ElasticNode(trainer, run, Membership(me, around, run.replicas.device), checkpoints, leaves_by)


def _in_turn(functions: Sequence[Callable[[], object]]) -> Callable[[], None]:
    def call_all() -> None:
        for function in functions:
            function()

    return call_all


def _address_towards(lighthouse: str) -> str:
    try:
        return own_address(lighthouse)
    except OSError as error:
        raise ValueError(
            f"elastic nodes: there is no route to the lighthouse at {lighthouse!r} ({error}): check HIERCOMM_LIGHTHOUSE"
            " or elastic="
        ) from error


def _own_store(host: str) -> TCPStore:
    try:
        return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    except RuntimeError as error:
        raise RuntimeError(
            f"elastic nodes: this node cannot connect to itself at {host} ({str(error).splitlines()[0]}): set"
            " HIERCOMM_ADDRESS to the address of an interface of this machine that other nodes reach"
        ) from error


def _fingerprint(run: TrainingRun) -> str:
    """Return a text that is equal for runs with the same shapes of parameters, scheme and wire."""
    shapes = [(name, tuple(value.shape), str(value.dtype)) for name, value in run.module.named_parameters()]
    what = re.sub(r" at 0x[0-9a-f]+", "", repr([[scheme.config for scheme in run.schemes], shapes, run.wire]))
    return hashlib.blake2b(what.encode(), digest_size=6).hexdigest()


def was_restarted() -> bool:
    """Return whether torchrun has restarted this node in this run; a program may fit again after the run's end."""
    return not has_ended_here() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
