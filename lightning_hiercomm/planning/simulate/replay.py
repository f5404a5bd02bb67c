"""Trains a recorded run of nodes that came and went once more, on threads of this process, to the same bits."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.threads import ThreadWorld
from lightning_hiercomm.comm.wire import Wire
from lightning_hiercomm.elastic import Elastic
from lightning_hiercomm.elastic.lanes import GlooLinks, Links
from lightning_hiercomm.elastic.meeting import Meeting, Member
from lightning_hiercomm.elastic.membership import Membership
from lightning_hiercomm.elastic.record import Entry, Record, digest
from lightning_hiercomm.elastic.topology import ElasticTopology
from lightning_hiercomm.elastic.transaction import Transaction
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.planning.errors import PlanningError
from lightning_hiercomm.run.replicas import Replicas, broadcast_values, trained_by
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import RunningScheme, Scheme

_PATIENCE = 600.0
"""Seconds that a thread waits for another one's training."""

_MOST_RANKS = 2
"""Of a node: sums of more depend on their order, which is not recorded."""


@dataclass(frozen=True)
class Program:
    """What a run has trained. A function of the user's returns it, given the name of the node that began first.

    Attributes:
        module: The LightningModule, with the values that it has on that node when ``fit`` begins. Its
            ``training_step`` and ``configure_optimizers`` are called, without a Trainer; no other hook is.
        loader: Of the training data, as it is given to the Trainer: with indices, in order or shuffled by Lightning.
        scheme: As it is given to the strategy.
        wire_dtype: Likewise.
    """

    module: nn.Module
    loader: DataLoader[Any]
    scheme: Scheme
    wire_dtype: str | None = None


def program_at(place: str, record: Record) -> Program:
    """What a function returns that is named as ``file.py:function``, or ``package.module:function``.

    Raises:
        PlanningError: If it is not there, or returns something else.
    """
    where, _, name = place.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location("replayed_program", where)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.path.insert(0, str(Path(where).absolute().parent))
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, os.getcwd())
            module = importlib.import_module(where)
        function = getattr(module, name)
    except (ImportError, OSError, AttributeError, ValueError) as error:
        raise PlanningError(f"{place}: it must be file.py:function or package.module:function ({error})") from error
    made = function(_beginner(record))
    if not isinstance(made, Program):
        raise PlanningError(
            f"{place} returned {type(made).__name__}: it must return"
            " lightning_hiercomm.planning.simulate.replay.Program(module, loader, scheme)"
        )
    return made


def replay(record: Record, program: Program, links: StoredLinks | None = None) -> nn.Module:
    """Train it once more; what all nodes end with.

    Every life of a node is a thread (with one more for a second rank), from its first agreement to its last. They meet
    as they have met: the same code decides who takes which share of the data, and moves parameters through gloo, so
    sums are made in the same order. A newcomer gets its source's parameters, and the states of its optimizer,
    schedulers and scheme, by their own ``state_dict``: not by the checkpoint in memory through which it was healed.

    Args:
        record: Of the run.
        program: What it has trained.
        links: How nodes reach each other. Default: by gloo.

    Raises:
        PlanningError: If the run cannot be replayed, or goes another way than the record says.
    """
    _check(record, program)
    threads, randoms = torch.get_num_threads(), _random_states()
    torch.set_num_threads(record.about["threads"])
    try:
        ends = _Play(record, program, links or _GlooBetweenThreads()).run()
    finally:
        torch.set_num_threads(threads)
    if randoms != _random_states():
        raise PlanningError(
            "something has drawn random numbers while it trained, such as dropout or an augmentation: that cannot be"
            " replayed to the bit"
        )
    digests = {node: digest(module) for node, module in ends.items()}
    if len({*digests.values()}) != 1:
        raise PlanningError(f"nodes have ended with other parameters than each other: {digests}")
    return next(iter(ends.values()))


def _check(record: Record, program: Program) -> None:
    about = record.about
    ranks = max((ranks for _, ranks in record.lives.values()), default=0)
    sampler, seen = program.loader.sampler, program.loader.dataset
    reasons = [
        (not record.steps, "the run was not over when its record was written last"),
        (about["begins_after_steps"], "the run went on from a checkpoint, which is no part of the record"),
        (about["optimizers"] != 1, "the module has several optimizers"),
        (about["accumulate_grad_batches"] != 1, "gradients were accumulated over several batches"),
        (about["gradient_clip_val"], "gradients were clipped"),
        (about["precision"] != "32-true", f"its precision was {about['precision']}"),
        (ranks > _MOST_RANKS, f"a node had {ranks} ranks, and sums of more than {_MOST_RANKS} depend on their order"),
        (isinstance(seen, IterableDataset), "the data have no indices"),
        (not isinstance(sampler, RandomSampler | SequentialSampler), "the loader has a sampler of its own"),
        (program.scheme.profile.follows_run, "DASO's phases go by the run's length and loss, which are not recorded"),
        (program.loader.batch_size is None, "the loader makes no batches by itself"),
    ]
    for holds, reason in reasons:
        if holds:
            raise PlanningError(f"this run cannot be replayed: {reason}")


def _beginner(record: Record) -> str:
    """The name of the node whose parameters all began with."""
    return record.lives[record.entries[0].members[0]][0] if record.entries else ""


def _random_states() -> list[object]:
    states: list[object] = [torch.get_rng_state().tolist(), random.getstate()]
    numpy = sys.modules.get("numpy")
    return states if numpy is None else [*states, repr(numpy.random.get_state())]


# ---- who meets -------------------------------------------------------------------------------------------------------


class _Gone(BaseException):
    """The life of a node is over."""


class _Script:
    """A lighthouse that lets nodes meet as they have met.

    Args:
        record: Of the run.
        begin: Lets a life begin, in time for its first agreement.
    """

    def __init__(self, record: Record, begin: Callable[[str], None]) -> None:
        self._agreements = [*record.agreements()]
        self._turns: dict[str, deque[int]] = {life: deque() for life in record.lives}
        for number, entry in enumerate(self._agreements):
            for life in (*entry.members, *entry.newcomers):
                self._turns[life].append(number)
        self._first: dict[int, list[str]] = {}
        for life, turns in self._turns.items():
            self._first.setdefault(turns[0], []).append(life)
        self._begin = begin
        self._said: dict[int, dict[str, Mapping[str, Any]]] = {}
        self._done: dict[str, set[str]] = {}
        self._changed = threading.Condition()
        self._is_over = False

    def begin(self) -> None:
        """Let those begin who were there first."""
        self._let_begin(0)

    def _let_begin(self, number: int) -> None:
        for life in self._first.get(number, ()):
            self._begin(life)

    def all_of(self, life: str) -> deque[Entry]:
        """The agreements of a life, also if another rank of its node has already asked for the first."""
        return deque(entry for entry in self._agreements if life in (*entry.members, *entry.newcomers))

    def ask(self, life: str, says: Mapping[str, Any], patience: float) -> Sequence[Mapping[str, Any]] | None:
        """What everyone says who has met then, once all of them are there."""
        turns = self._turns[life]
        if not turns:
            raise _Gone
        number = turns[0]
        entry = self._agreements[number]
        everyone = {*entry.members, *entry.newcomers}
        with self._changed:
            said = self._said.setdefault(number, {})
            if life not in said:
                said[life] = says
                if len(said) == len(everyone):
                    self._let_begin(number + 1)
                    self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or len(said) == len(everyone), patience)
            if self._is_over:
                raise _Gone
            if len(said) < len(everyone):
                return None
            turns.popleft()
            self._said.pop(number - 1, None)
            return [said[each] for each in sorted(said)]

    def wait_for_all(self, meeting: Meeting, life: str) -> None:
        """Until all members have what was exchanged: nobody closes a connection that others still read from."""
        with self._changed:
            done = self._done.setdefault(meeting.token, set())
            done.add(life)
            if len(done) == len(meeting.members):
                del self._done[meeting.token]  # now: who leaves late may be in no other meeting
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or len(done) == len(meeting.members), _PATIENCE)
            if len(done) < len(meeting.members):
                raise _Gone

    def end(self) -> None:
        """Nobody meets any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def take_note(self, note: str) -> bool:
        """Nobody asks for it."""
        return True

    def notes(self) -> Collection[str] | None:
        """None of them."""
        return ()

    def when_back(self, look: Callable[[], bool | None]) -> None:
        """Nobody is ever away."""

    def leave(self) -> None:
        """Nobody is missed who should not be."""


class StoredLinks(Links, Protocol):
    """How threads reach each other.

    Attributes:
        stores: By life, what it keeps for others.
    """

    stores: dict[str, Store]


class _GlooBetweenThreads(GlooLinks):
    """Groups of gloo whose members are threads."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1", _PATIENCE)
        self.stores: dict[str, Store] = {}

    def ask(self, address: str, work: Callable[[Store], Any], patience: float | None = None) -> Any:
        return work(self.stores[address])

    def unreachable(self, addresses: Sequence[str]) -> Sequence[str]:
        return ()


# ---- what they do ----------------------------------------------------------------------------------------------------


class _Play:
    """All lives of all nodes."""

    def __init__(self, record: Record, program: Program, links: StoredLinks) -> None:
        self.record, self.program, self.links = record, program, links
        self.script = _Script(record, self._live)
        self._threads: list[threading.Thread] = []
        self._ends: dict[str, nn.Module] = {}
        self._error: BaseException | None = None

    def run(self) -> dict[str, nn.Module]:
        """What each rank has ended with."""
        self.script.begin()
        for thread in self._threads:  # which grow meanwhile
            while thread.is_alive() and self._error is None:
                thread.join(0.1)
        if self._error is not None:
            raise PlanningError(f"the replay ended: {self._error}") from self._error
        return self._ends

    def _live(self, life: str) -> None:
        node, ranks = self.record.lives[life]
        self.links.stores[life] = HashStore()
        world = ThreadWorld(ranks, _PATIENCE, one_processor=False)
        for local in range(ranks):
            work = partial(self._train, life, node, local, world)
            thread = threading.Thread(target=work, daemon=True, name=f"{node}.{local}")
            self._threads.append(thread)
            thread.start()

    def _train(self, life: str, node: str, local: int, world: ThreadWorld) -> None:
        torch.set_num_threads(self.record.about["threads"])  # every thread has a number of its own
        try:
            self._ends[f"{node}.{local}"] = _Rank(self, life, node, local, world).train()
        except _Gone as gone:
            world.fail(local, gone)
        except BaseException as error:
            if not isinstance(error.__cause__, _Gone):
                self._error = self._error or error
                self.script.end()
                self.links.stores.clear()  # who asks for what another one keeps learns it, too
            world.fail(local, error)


class _Rank:
    """One rank of one life of a node."""

    def __init__(self, play: _Play, life: str, node: str, local: int, world: ThreadWorld) -> None:
        self._record, self._script, self._program = play.record, play.script, play.program
        about = self._record.about
        self.module = copy.deepcopy(self._program.module).train()
        vars(self.module).update(log=_nowhere, log_dict=_nowhere)
        self.optimizer, self._schedulers = _configured(self.module)
        meter = Meter()
        self._topology = ElasticTopology(Topology([range(world.size)], local, world.connect(local, meter), meter))
        replicas = Replicas(self.module, [self.optimizer], about["bucket_bytes"], about["average_buffers"])
        self.run = TrainingRun(self._program.scheme, replicas, self._topology, Wire.named(self._program.wire_dtype))
        known = about["run"].rpartition(":")[2]
        if self.run.fingerprint() != known:
            raise PlanningError(
                f"the program trains {self._program.scheme!r} with {self.run.wire!r}, the record is of"
                f" {about['scheme']} with {about['wire']}, or their modules have other shapes"
            )
        is_first = local == 0
        self._membership = Membership(
            Member(node, life, about["run"], world.size, life),
            Elastic(dead_after=_PATIENCE),
            self._topology,
            self._script if is_first else None,
            play.links,
            play.links.stores[life] if is_first else None,
            self._before_change,
        )
        self._membership.me = replace(self._membership.me, life=life)
        self._membership.vote = self._vote  # type: ignore[method-assign]
        self._transaction = Transaction(
            self._membership,
            self._topology,
            self._undo_point,
            self._place,
            lambda: self._batches,
            self._scheme.settle,
        )
        self._transaction.has_agreed = self._compare
        self._life, self._turns = life, self._script.all_of(life)
        self._local, self._batches, self._epoch_began = local, 0, 0
        self._stream: Iterator[Any] = iter(())

    @property
    def _scheme(self) -> RunningScheme[Scheme]:
        return self.run.schemes[0]

    def train(self) -> nn.Module:
        """From the life's first agreement to the run's end; what it has trained."""
        try:
            self._join()
            while self._scheme.steps < self._record.steps:
                if self._batches in self._record.epochs:
                    self._begin_epoch()
                self._membership.give_state(self._state)
                self._train_batch()
                self._look()
            if not self._record.ends_epoch:  # max_steps has cut it short
                self.run.end_epoch()
                self._look()
            self.run.finish()
            self._membership.give_state(self._state)
            return self.module
        except Exception:
            self._topology.disconnect()  # who waits for this one learns it
            raise
        finally:
            self._topology.agree_by(None)
            self.run.close(timeout=1.0)

    def _join(self) -> None:
        while True:
            meeting = self._transaction.begin(self._begin_equal, admits=True)
            self.run.begin_from_module()
            if meeting is None:
                break
            self._compare(meeting)
            source = meeting.source_of(self._life)
            assert source is not None
            if self._turns and self._life in self._turns[0].members:  # or it was not healed in the end
                state = self._membership.heal(source)
                assert state is not None
                self._take(state)
                break
        self.run.remember_values()
        self._topology.agree_by(self._transaction)

    def _begin_equal(self) -> None:
        broadcast_values([*self.module.parameters(), *self.module.buffers()], self._topology.world)

    def _before_change(self) -> Callable[[], None]:
        return self._scheme.before_nodes_change()

    def _undo_point(self) -> Callable[[], None]:
        return self._scheme.undo_point()

    def _place(self) -> str:
        return f"after {self._scheme.steps} optimizer steps"

    def _vote(self, meeting: Meeting, well: bool) -> bool:
        """What was taken back is not in a record, so nothing is."""
        if not well:
            raise PlanningError("an exchange has failed")
        if self._local == 0:
            self._script.wait_for_all(meeting, self._life)
        self._topology.intra.all_gather_object(None)
        return True

    def _compare(self, meeting: Meeting) -> None:
        """See that the run goes the way that the record says.

        Raises:
            PlanningError: If it does not.
        """
        entry, draw = self._turns.popleft(), self._membership.draw
        sources = {each.life: meeting.source_of(each.life) for each in meeting.newcomers}
        now: list[object] = [
            tuple(member.life for member in meeting.members),
            {life: source.life for life, source in sources.items() if source is not None},
        ]
        then: list[object] = [entry.members, entry.newcomers]
        if self._life in entry.members:
            now.append(min(max(entry.steps, self._scheme.steps), entry.until))
            then.append(self._scheme.steps)
            now.append((draw.total, draw.shares))
            then.append((entry.all_shares, entry.shares))
        if self._turns and self._turns[0].connects:  # perhaps after an exchange that was taken back
            self._membership.me = replace(self._membership.me, groups="")
        if now != then:
            raise PlanningError(f"the run goes another way than its record: {now}, recorded {then}")

    # ---- healing -------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any] | None:
        if not (self._scheme.is_agreed or self._scheme.config.profile.begins_with_copy):
            return None
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler, _, _ in self._schedulers],
            "schedule": {**self.run.schedules()[0], "unagreed_steps": self._scheme.unagreed_steps},
            "epoch_began": self._epoch_began,
            "batches": self._batches,
        }

    def _take(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        for (scheduler, _, _), own in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)
        self.run.begin_from_module()
        self.run.load_schedules([state["schedule"]])
        self._batches, self._epoch_began = state["batches"], state["epoch_began"]
        if self._batches not in self._record.epochs:
            self._stream = self._drawn(self._batches - self._epoch_began)

    # ---- training ------------------------------------------------------------------------------------------------

    def _begin_epoch(self) -> None:
        self._membership.begin_epoch(self._batches)
        self._epoch_began = self._batches
        self.run.begin_epoch(self._record.epochs[self._batches].number, {})
        self._stream = self._drawn(0)

    def _drawn(self, begin: int) -> Iterator[Any]:
        """The batches of this rank's share of the data, as Lightning draws them."""
        loader, me = self._program.loader, self._membership.me
        dataset: Any = loader.dataset
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset,
            me.all_shares,
            me.shares[self._local],
            shuffle=isinstance(loader.sampler, RandomSampler),
            seed=self._record.about["seed"],
        )
        sampler.set_epoch(self._record.epochs[self._epoch_began].number)
        batch_size = loader.batch_size
        assert batch_size is not None
        for indices in islice(BatchSampler(sampler, batch_size, loader.drop_last), begin, None):
            yield loader.collate_fn([dataset[index] for index in indices])

    def _train_batch(self) -> None:
        batch, index = next(self._stream), self._batches - self._epoch_began
        self._batches += 1
        is_last = self._scheme.steps + 1 == self._record.steps and self._record.ends_epoch
        ends_epoch = is_last or self._batches in self._record.epochs
        self.run.step(self.optimizer, partial(self._step, batch, index), last=ends_epoch)
        if ends_epoch:
            self.run.end_epoch()
        for scheduler, interval, frequency in self._schedulers:
            epochs = self._record.epochs[self._epoch_began].number + 1
            done = self._batches - self._epoch_began if interval == "step" else epochs
            if (interval == "step" or ends_epoch) and done % frequency == 0:
                scheduler.step()

    def _step(self, batch: Any, index: int) -> None:
        """What Lightning, and DDP inside the node, do."""
        if self._topology.intra.size > 1:
            broadcast_values(list(self.module.buffers()), self._topology.intra)
        self.optimizer.zero_grad()
        output = self.module.training_step(batch, index)  # type: ignore[operator]
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        loss.backward()
        if self._topology.intra.size > 1:
            gradients = [parameter.grad for parameter in trained_by(self.optimizer) if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self.run.gradients.reduce(flat).wait()
            for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        self.optimizer.step()

    def _look(self) -> None:
        """Meet as for a validation or a checkpoint, which have changed nothing but who is known to be there."""
        while True:
            if not self._turns or not self._turns[0].looks or self._turns[0].steps != self._scheme.steps:
                return
            self._transaction(lambda: None, admits=self._scheme.may_be_copied)


def _nowhere(*args: object, **kwargs: object) -> None:
    """Where what is logged goes."""


def _configured(module: nn.Module) -> tuple[Optimizer, list[tuple[Any, str, int]]]:
    """The optimizer of a LightningModule, and its schedulers with how often they step.

    Raises:
        PlanningError: If it has others than one optimizer, and schedulers that look at nothing.
    """
    made: Any = module.configure_optimizers()  # type: ignore[operator]
    schedulers: Any = []
    if isinstance(made, Mapping):
        made, schedulers = made["optimizer"], [made["lr_scheduler"]] if "lr_scheduler" in made else []
    elif isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], list):
        made, schedulers = made
    if isinstance(made, list) and len(made) == 1:
        made = made[0]
    if not isinstance(made, Optimizer):
        raise PlanningError("this run cannot be replayed: configure_optimizers does not return one optimizer")
    stepped = []
    for each in schedulers:
        own = dict(each) if isinstance(each, Mapping) else {"scheduler": each}
        if own.get("monitor") or isinstance(own["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise PlanningError("this run cannot be replayed: a scheduler looks at what was logged")
        stepped.append((own["scheduler"], own.get("interval", "epoch"), int(own.get("frequency", 1))))
    return made, stepped
