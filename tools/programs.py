"""Random programs: ``python -m tools.programs --seconds 3600 --seed 1``, in a checkout.

A program is a ``Trainer.fit`` with one or two actions that real programs contain, each in a hook, at a moment, on all
ranks or on some. Every program must end within ``hang_timeout`` plus 5 s of its last progress, and either

- end normally on all ranks, with the same model to the bit. All ranks reach the hooks that Lightning reaches on one
  device, and hold at each of them the values of a calculation in one process (:mod:`programs_alone`). Otherwise a
  warning names the cause;
- or end with an error on all ranks that names the cause. A program that is right under plain DDP must not do so.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import multiprocessing.connection
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests", "tools")]

import lightning.pytorch as pl
import torch
from combinations import tell
from lightning.pytorch.callbacks import ModelCheckpoint
from problems import one_trainer
from programs_alone import Alone
from programs_toy import (
    ACTIONS,
    BATCH_HOOKS,
    BATCHES,
    CAUSES,
    EPOCHS,
    HOOKS,
    LAYOUTS,
    MANUAL,
    OPTIMIZERS,
    TRAININGS,
    Action,
    Program,
    Toy,
)
from ranks import Ranks
from torch import Tensor

from lightning_hiercomm import (
    DASO,
    AllReduce,
    DiLoCo,
    Gossip,
    Health,
    HierarchicalStrategy,
    PeriodicAveraging,
    Scheme,
    StepsDelay,
)

HANG_TIMEOUT, PATIENCE = 4.0, 5.0
SCHEMES: dict[str, Callable[[], Scheme]] = {
    "all_reduce": AllReduce,
    "periodic": lambda: PeriodicAveraging(2),
    "periodic, epochs": lambda: PeriodicAveraging(None),
    "periodic, no epochs": lambda: PeriodicAveraging(2, at_epoch_end=False),
    "diloco": lambda: DiLoCo(2),
    "gossip": lambda: Gossip("ring", segments=1),
    "daso": lambda: DASO(2, 1, warmup_epochs=0, cooldown_epochs=0),
    "daso, warm-up": lambda: DASO(2, 1, warmup_epochs=EPOCHS, cooldown_epochs=0),
    "steps_delay": lambda: StepsDelay(2, warmup_steps=2),
    "steps_delay, warm-up": lambda: StepsDelay(2, warmup_steps=100),
}
NOT_CALCULATED = ("steps_delay",)
OWN = ("bank", "own")
"""Buffers that differ between ranks, or that some ranks lack."""


class Hang(AssertionError):
    """Ranks that do not end, or end late."""


class Death(AssertionError):
    """A process that dies, or a run that ends normally on some ranks only."""


class Unexplained(AssertionError):
    """An error that does not name its cause."""


class Refusal(AssertionError):
    """An error in a program that is right under DDP."""


class WrongAnswer(AssertionError):
    """A wrong result without a warning that names the cause."""


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def drawn(number: int) -> Program:
    """Return the program of a number, always the same."""
    draw = random.Random(number)
    program = Program(
        layout=draw.choice(["1x2", "2x1", "2x1", "2x2", "2x2", "3x1", "2+1"]),
        scheme=draw.choice([*SCHEMES]),
        training=draw.choice(["automatic"] * 8 + ["manual"] * 5 + [*TRAININGS]),
        optimizer=draw.choice([*OPTIMIZERS]),
        wire=draw.choice([None] * 5 + ["int8"]),
        in_module=draw.random() < 0.5,
    )
    program = replace(program, actions=tuple(_action(draw, program) for _ in range(draw.choice([1, 1, 2]))))
    return program if goes_together(program) else drawn(number + 1_000_003)


def _action(draw: random.Random, program: Program) -> Action:
    name = draw.choice([*ACTIONS])
    hook = draw.choice(ACTIONS[name].hooks)
    is_once = hook in ("on_fit_start", "on_train_start", "on_train_end")
    at = draw.randrange(1 if is_once else EPOCHS * BATCHES if hook in BATCH_HOOKS else EPOCHS)
    if draw.choice(ACTIONS[name].on) == "all":
        return Action(name, hook, at, tuple(range(program.world)))
    return Action(name, hook, at, draw.choice([(0,), (draw.randrange(1, program.world),), program.nodes[-1]]))


def goes_together(program: Program) -> bool:
    """Return whether no documented rule forbids a program."""
    if program.scheme.startswith("steps_delay") and (program.optimizer, program.wire) != ("sgd", None):
        return False  # refused: its local rule is for SGD, and its wire casts
    if program.has("swap") and program.has("best"):
        return False  # they share what they remember
    if program.has("state") and program.has("bank", "extra"):
        return False  # a new module lacks the buffer when it resumes
    names = [action.name for action in program.actions]
    return len({*names}) == len(names) and all(_fits(action, program) for action in program.actions)


def _fits(action: Action, program: Program) -> bool:
    kind = ACTIONS[action.name]
    is_on_all = len(action.ranks) == program.world
    return program.training in kind.needs and action.hook in kind.hooks and ("all" in kind.on or not is_on_all)


# ---- one rank --------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """A hook that a rank has reached, with the parameters before its actions."""

    hook: str
    is_last: bool
    values: list[float]


class Hooks(pl.Callback):
    """Records every hook in a file, and runs the actions unless the module does."""

    def __init__(self, toy: Toy) -> None:
        self.toy, self.saved, self.restored = toy, None, None
        toy.callback = self

    def reach(self, hook: str, trainer: Any) -> None:
        event = Event(hook, hook == "on_train_batch_end" and trainer.is_last_batch, self.toy.flat().tolist())
        with (self.toy.folder / f"events-{self.toy.rank}").open("a") as events:
            events.write(f"{json.dumps(event)}\n")
        if not self.toy.program.in_module or hook == "training_step":
            self.toy.act(hook, trainer)

    def state_dict(self) -> dict[str, Any]:
        self.saved = self.toy.state
        return {} if self.saved is None else {"state": self.saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict.get("state")


def _events_in(folder: Path, rank: int) -> list[Event]:
    path = folder / f"events-{rank}"
    return [Event(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def _of_callback(hook: str) -> Callable[..., None]:
    return lambda self, trainer, *_: self.reach(hook, trainer)


def _of_module(hook: str) -> Callable[..., int | None]:
    def reach(self: Toy, *_: object) -> int | None:
        if self.program.in_module:
            self.act(hook, self.trainer)
        leaves = hook == "on_train_batch_start" and "leave" in self.effects
        self.effects.discard("leave")
        return -1 if leaves else None

    return reach


for _hook in HOOKS:
    if _hook != "training_step":
        setattr(Hooks, _hook, _of_callback(_hook))
        setattr(Toy, _hook, _of_module(_hook))


@dataclass
class Outcome:
    """The outcome of a program on one rank.

    Attributes:
        how: ``"ended"``, ``"error"``, ``"hangs"``, or how its process died.
        error: Its exception, with notes.
        state: The state of its module.
        saved: The step and the model of the checkpoint that an action saved.
        number: The value that it logged.
        states: The state of the callback when it was saved, and after a second fit has restored it.
        late: Seconds from the last event of all ranks, and ``hang_timeout``, to its end.
        events: The hooks that it has reached.
        output: Its standard output and error.
    """

    how: str
    error: str = ""
    state: dict[str, Tensor] = field(default_factory=dict)
    saved: tuple[int, dict[str, Tensor]] | None = None
    number: float = math.nan
    states: tuple[Any, Any] = (None, None)
    late: float = 0.0
    events: list[Event] = field(default_factory=list)
    output: str = ""


def run_rank(program: Program, folder: Path, hang_timeout: float) -> Outcome:
    """Run a program on this rank; after an error its process ends, as a script's does."""
    rank = int(os.environ["LOCAL_RANK"])
    _print_to(folder / f"output-{rank}")
    faulthandler.register(signal.SIGUSR1, 2, all_threads=True)
    try:
        return _fit(program, rank, folder, hang_timeout)
    except BaseException as error:
        traceback.print_exc()
        notes = " ".join(getattr(error, "__notes__", []))
        outcome = Outcome("error", f"{type(error).__name__}: {error} {notes}")
        (folder / f"outcome-{rank}").write_bytes(pickle.dumps(outcome))
        os._exit(0)
    finally:
        _print_to(Path(os.devnull))


def _print_to(path: Path) -> None:
    """Redirect all output to a file, including that of loggers and child processes."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.disable(logging.NOTSET)
    logging.root.handlers[:] = [logging.StreamHandler(sys.stderr)]
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    warnings.simplefilter("always")
    warnings.showwarning = lambda *warning: print(warnings.formatwarning(*warning[:4]), file=sys.stderr)  # not pytest's


def _fit(program: Program, rank: int, folder: Path, hang_timeout: float) -> Outcome:
    toy = Toy(program, rank, folder, hang_timeout)
    trainer = _trainer(toy)
    trainer.fit(toy)
    outcome = Outcome("ended", number=float(trainer.callback_metrics.get("number", math.nan)))
    outcome.state = {name: value.detach().clone() for name, value in toy.state_dict().items()}
    if toy.saved is not None:
        saved = torch.load(toy.saved, weights_only=False)
        outcome.saved = saved["global_step"], saved["state_dict"]
    if program.has("state"):
        again = Toy(replace(program, actions=()), rank, folder / "again", hang_timeout)
        last = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        _trainer(again, True).fit(again, ckpt_path=last, weights_only=False)
        outcome.states = toy.callback.saved, again.callback.restored
    return outcome


def _trainer(toy: Toy, resumes: bool = False) -> pl.Trainer:
    program, folder = toy.program, toy.folder
    folder.mkdir(exist_ok=True)
    strategy: Any = "auto"
    if program.world > 1:
        strategy = HierarchicalStrategy(
            SCHEMES[program.scheme](),
            ranks_per_node=LAYOUTS[program.layout],
            wire_dtype=program.wire,  # type: ignore[arg-type]
            health=Health(hang_timeout=toy.hang_timeout),
            checkpoint_replicas=resumes or program.has("state"),
            find_unused_parameters=program.has("freeze"),
        )
    return one_trainer(
        folder,
        devices=program.world,
        strategy=strategy,
        max_epochs=EPOCHS + resumes,
        callbacks=[Hooks(toy), ModelCheckpoint(folder / "checkpoints")],
        enable_checkpointing=True,
    )


# ---- all ranks -------------------------------------------------------------------------------------------------------


class Watched(Ranks):
    """Ranks that may end in any way; they hang when none of them has reached a hook for long."""

    start_seconds = 60.0

    def outcomes(
        self, program: Program, hang_timeout: float = HANG_TIMEOUT, patience: float = PATIENCE
    ) -> list[Outcome]:
        """Run a program.

        Args:
            program: The program.
            hang_timeout: As in the strategy.
            patience: Seconds after ``hang_timeout`` when ranks count as hanging.
        """
        self._folder, self._seconds_of_hang = Path(tempfile.mkdtemp()), (hang_timeout, patience)
        try:
            outcomes: list[Outcome] = self.run(program.world, run_rank, program, self._folder, hang_timeout)
            for rank, outcome in enumerate(outcomes):
                outcome.events = _events_in(self._folder, rank)
                outcome.output = (self._folder / f"output-{rank}").read_text(errors="replace")
            return outcomes
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _returned(self, ranks: int, world: list[tuple[Any, Any]]) -> list[Any]:
        starts_until = time.time() + self.start_seconds
        hang_timeout, patience = self._seconds_of_hang
        outcomes: dict[int, Outcome] = {}
        are_as_before = True
        while waiting := {world[rank][1]: rank for rank in range(ranks) if rank not in outcomes}:
            progress = max((path.stat().st_mtime for path in self._folder.rglob("events-*")), default=starts_until)
            for ready in multiprocessing.connection.wait([*waiting], timeout=0.1):
                rank = waiting[ready]  # type: ignore[index]
                try:
                    is_well, said, is_as_before = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
                    outcomes[rank] = pickle.loads(said)
                    are_as_before &= is_well and is_as_before
                except EOFError:
                    outcomes[rank] = self._dead(rank, world[rank][0])
                outcomes[rank].late = time.time() - progress - hang_timeout
            if time.time() > progress + hang_timeout + patience:
                for rank in waiting.values():
                    if rank not in outcomes:
                        outcomes[rank] = Outcome("hangs", late=math.inf)
                        os.kill(world[rank][0].pid, signal.SIGUSR1)  # faulthandler prints its stacks
                time.sleep(0.3)
        if not are_as_before or any(outcome.how != "ended" for outcome in outcomes.values()):
            self._stop(ranks)
        return [outcomes[rank] for rank in range(ranks)]

    def _dead(self, rank: int, process: Any) -> Outcome:
        process.join()
        written = self._folder / f"outcome-{rank}"
        if written.exists():
            outcome: Outcome = pickle.loads(written.read_bytes())
            return outcome
        code = process.exitcode
        return Outcome(f"exit code {code}" if code >= 0 else signal.Signals(-code).name)


ranks = Watched()


# ---- what must hold --------------------------------------------------------------------------------------------------


def check(program: Program) -> None:
    """Run a program, and check its outcome.

    Raises:
        AssertionError: If it is not.
    """
    judge(program, ranks.outcomes(program))


def judge(program: Program, outcomes: list[Outcome], patience: float = PATIENCE) -> None:
    """Check the outcome of a program.

    Raises:
        AssertionError: If it is not.
    """
    hows = {outcome.how for outcome in outcomes}
    ends = "; ".join(f"rank {rank} {_end(outcome)}" for rank, outcome in enumerate(outcomes))
    if program.has("loop") and "hangs" in hows:
        return _judge_loop(program, outcomes, ends)
    if "hangs" in hows:
        raise Hang(ends)
    if max(outcome.late for outcome in outcomes) > patience:
        raise Hang(f"{max(outcome.late for outcome in outcomes):.1f} s after hang_timeout: {ends}")
    if not hows <= {"ended", "error", "exit code 1"} or ("ended" in hows and len(hows) > 1):
        raise Death(ends)
    if hows == {"ended"}:
        _judge_ended(program, outcomes)
        return
    said = "\n".join(f"{outcome.error}\n{outcome.output}" for outcome in outcomes)
    for outcome in outcomes:
        _judge_error(outcome.error or outcome.output, ends)
    culprits = {rank for action in program.actions if len(action.ranks) < program.world for rank in action.ranks}
    named = {int(rank) for ranks in re.findall(r"[Rr]anks? ([\d, ]+)", said) for rank in re.findall(r"\d+", ranks)}
    is_unsupported = _may_be_unsupported(program) and re.search(CAUSES[program.training], said)
    if culprits and not culprits & named and not is_unsupported:
        raise Unexplained(ends)
    if not _may_end(program):
        raise Refusal(ends)


def _judge_loop(program: Program, outcomes: list[Outcome], ends: str) -> None:
    """Check that a report names the rank that computes for ever, with its line: it may have a long task."""
    output = "".join(outcome.output for outcome in outcomes)
    report = "".join(re.findall(r"no rank made progress for .* \(hang_timeout\), and the run goes on: .*", output))
    busy = {int(rank) for rank in re.findall(r"rank (\d+) [^;]* is busy in programs_toy\.py:\d+ \(_loop\)", report)}
    ranks = {rank for action in program.actions if action.name == "loop" for rank in action.ranks}
    if not busy or not busy <= ranks:
        raise Unexplained(f"the report names {sorted(busy)} instead of {sorted(ranks)}: {ends}")


def _end(outcome: Outcome) -> str:
    """Describe in one line how a rank has ended."""
    events = outcome.events
    last = f"after hook {len(events)}, {events[-1].hook}," if events else "before all hooks"
    stacks = re.findall(r'most recent call first\):\n +File "[^"]*?([^/"]+)", line (\d+) in (\w+)', outcome.output)
    where = " in {}:{} {}".format(*stacks[-1]) if outcome.how == "hangs" and stacks else ""
    return f"{outcome.how} {last}{where} {outcome.error.splitlines()[0][:300] if outcome.error else ''}".strip()


def _judge_error(text: str, ends: str) -> None:
    if re.match("(Type|Attribute|Name|Assertion|Key|Index)Error", text):
        raise Refusal(ends)
    if "lightning_hiercomm" not in text and re.search("gloo|Connection|peer", text):
        raise Unexplained(ends)


def _may_end(program: Program) -> bool:
    if not program.on_all or _may_be_unsupported(program):
        return True
    if program.has("none") and program.training not in MANUAL:
        return True  # Lightning refuses it where there are several ranks
    return program.scheme.startswith("steps_delay") and program.has("write", "swap", "best", "clamp", "freeze")


def _may_be_unsupported(program: Program) -> bool:
    """Return whether a program cannot train this way on several nodes."""
    if program.training == "loss.backward":
        return program.scheme == "all_reduce" or len(program.nodes) < program.world
    if program.training == "zero" and program.scheme.startswith("steps_delay"):
        return True  # refused by name on any layout: its servers need the wrapped optimizer
    return program.training in CAUSES and program.scheme != "all_reduce" and len(program.nodes) > 1


def _judge_ended(program: Program, outcomes: list[Outcome]) -> None:
    first, output = outcomes[0], "".join(outcome.output for outcome in outcomes)
    causes = [ACTIONS[action.name].cause for action in program.actions]
    if _may_be_unsupported(program):
        causes.append(CAUSES[program.training])
    if any(re.search(cause, output) for cause in causes):
        return
    hooks = [event.hook for event in first.events]
    alone = Alone(program)
    alone.replay([(event.hook, event.is_last) for event in first.events])
    for rank, outcome in enumerate(outcomes):
        expected = {name: value for name, value in first.state.items() if name not in OWN}
        expected |= {name: value for name, value in alone.toys[rank].named_buffers() if name in OWN}
        if expected.keys() != outcome.state.keys():
            raise WrongAnswer(f"rank {rank} ends with {[*outcome.state]} instead of {[*expected]}")
        for name, value in expected.items():
            _compare(outcome.state[name], value, 0.0, f"{name} of rank {rank}")
        if [event.hook for event in outcome.events] != hooks:
            raise WrongAnswer(f"rank {rank} reaches {[event.hook for event in outcome.events]}, rank 0 {hooks}")
        saved, restored = outcome.states
        if type(saved) is not type(restored) or saved != restored:
            raise WrongAnswer(f"rank {rank} restores {restored!r} instead of {saved!r}")
        if program.on_all and _has_done(program, hooks, "log") and outcome.number != (program.world + 1) / 2:
            raise WrongAnswer(f"rank {rank} logs {outcome.number} instead of {(program.world + 1) / 2}")
    if hooks != expected_hooks(program):
        raise WrongAnswer(f"reaches {hooks} instead of {expected_hooks(program)}")
    if program.scheme not in NOT_CALCULATED or len(program.nodes) == 1:
        _judge_values(program, outcomes, alone)
    if "lightning_hiercomm:" in output and not program.has("long"):
        raise WrongAnswer(f"a false alarm: {re.findall('lightning_hiercomm:.*', output)}")


def _has_done(program: Program, hooks: list[str], name: str) -> bool:
    return any(action.name == name and hooks.count(action.hook) > action.at for action in program.actions)


def _judge_values(program: Program, outcomes: list[Outcome], alone: Alone) -> None:
    tolerance = 1e-9 if program.wire is None else 0.1
    for rank, outcome in enumerate(outcomes):
        for number, (event, seen) in enumerate(zip(outcome.events, alone.seen, strict=True)):
            values = torch.tensor(event.values, dtype=torch.float64)
            _compare(values, seen[rank], tolerance, f"at hook {number}, {event.hook}, rank {rank}")
    state = outcomes[0].state
    _compare(torch.cat([state["weight"], state["head"]]), alone.flat[0], tolerance, "the end")
    if outcomes[0].saved is not None and alone.saved is not None:
        _, saved = outcomes[0].saved
        _compare(torch.cat([saved["weight"], saved["head"]]), alone.saved, tolerance, "the checkpoint")


def _compare(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    is_alike = actual.shape == expected.shape and actual.dtype == expected.dtype
    if not is_alike or not torch.allclose(actual, expected, rtol=0, atol=tolerance):
        raise WrongAnswer(f"{what}: {actual.tolist()} instead of {expected.tolist()}")


def expected_hooks(program: Program) -> list[str]:
    """Return the hooks that Lightning reaches on one device."""
    steers = ("save", "stop", "none", "leave", "twice")
    actions = [a for a in program.actions if a.name in steers and len(a.ranks) == program.world]
    alike = tuple(replace(action, ranks=(0,)) for action in actions)
    return _hooks_of(Program("1x1", "", alike, program.training, in_module=program.in_module))


@lru_cache
def _hooks_of(program: Program) -> list[str]:
    folder = Path(tempfile.mkdtemp())
    try:
        toy = Toy(program, 0, folder)
        _trainer(toy).fit(toy)
        return [event.hook for event in _events_in(folder, 0)]
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    from programs import check, drawn  # ranks find programs by this name

    sys.exit(tell(__doc__, "tools.programs", drawn, check, among=10**7))
