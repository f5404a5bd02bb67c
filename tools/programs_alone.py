"""Calculates the result of a program of :mod:`programs` in one process, with a module and an optimizer per rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from programs_toy import Program, Toy
from torch import Tensor

from lightning_hiercomm.schemes.reducers.graphs import Ring

_SKIPS = {"none", "skip"}


class Alone:
    """Replays the hooks that a run has reached.

    Args:
        program: The program.

    Attributes:
        seen: All ranks' parameters at every hook, before its actions.
        saved: The model of the checkpoint that an action saved.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.scheme = program, program.scheme
        self.toys = [Toy(program, rank) for rank in range(program.world)]
        self.optimizers = [toy.configure_optimizers() for toy in self.toys]
        self.trainers = [SimpleNamespace(optimizers=[o], save_checkpoint=lambda _: None) for o in self.optimizers]
        for toy in self.toys:
            toy.log = lambda *_, **__: None  # type: ignore[method-assign]
            toy.peers = self.toys
        shares_all = self.scheme in ("all_reduce", "steps_delay, warm-up")
        self.groups = [tuple(range(program.world))] if shares_all else program.nodes
        self.trained = self._trained_now()
        self.reference, self.velocity = self._mean(), torch.zeros(5).double()
        self.step_in_epoch = self.steps = self.unsynced = self.looks = 0
        self.arriving: Tensor | None = None
        self.seen: list[list[Tensor]] = []
        self.saved: Tensor | None = None

    def replay(self, hooks: Sequence[tuple[str, bool]]) -> None:
        """Replay a run.

        Args:
            hooks: Their names, and whether the batch is the epoch's last one.
        """
        left = iter(hooks)
        for hook, is_last in left:
            self._reach(hook, is_last, left)

    def _reach(self, hook: str, is_last: bool, left: Iterator[Any]) -> None:
        self._before(hook, is_last)
        self.seen.append(self.flat)
        for toy in self.toys:
            if hook == "training_step":
                toy.effects.clear()
        all_do = zip(*(toy.acts(hook) for toy in self.toys), strict=True)
        for action, does in zip(self.program.actions, all_do, strict=True):
            for do, trainer in zip(does, self.trainers, strict=True):
                if do is not None:
                    do(trainer)
            if action.name == "save" and any(does):
                self._reach(*next(left, ("on_save_checkpoint", False)), left)
                self.saved = self.last_saved
        self._after(hook)

    def _before(self, hook: str, is_last: bool) -> None:
        if (hook == "on_train_batch_end" and is_last) or hook == "on_train_epoch_end":
            self._end_epoch()
        elif hook in ("on_validation_start", "on_save_checkpoint"):
            self._show_mean()
        elif hook == "on_train_end":
            self._put(self._mean())
        elif hook == ("training_step" if self.toys[0].automatic_optimization else "on_before_optimizer_step"):
            self._follow()

    def _after(self, hook: str) -> None:
        if hook == "training_step":
            self._train()
        elif hook == "on_before_optimizer_step":
            self._step()
        elif hook == "on_train_start":
            self.reference = self._mean()
        elif hook == "on_train_epoch_start":
            self.step_in_epoch = 0
        elif hook == "on_train_batch_start" and {*self._trained_now()} - {*self.trained}:
            self._follow()
        elif hook in ("on_validation_end", "on_save_checkpoint"):
            self.last_saved = self.flat[0]  # a file holds what hooks write to the tensors that Lightning has collected
            self._hide_mean()

    # ---- values --------------------------------------------------------------------------------------------------

    @property
    def flat(self) -> list[Tensor]:
        return [toy.flat() for toy in self.toys]

    def _mean(self) -> Tensor:
        return torch.stack(self.flat).mean(0)

    @torch.no_grad()
    def _put(self, values: Tensor | Sequence[Tensor]) -> None:
        for rank, toy in enumerate(self.toys):
            own = values if isinstance(values, Tensor) else values[rank]
            toy.weight.copy_(own[:3])
            toy.head.copy_(own[3:])

    def _show_mean(self) -> None:
        self.looks += 1
        if self.looks == 1:
            self.own, self.shown = self.flat, self._mean()
            self._put(self.shown)

    def _hide_mean(self) -> None:
        self.looks -= 1
        if self.looks == 0:
            if not all(torch.equal(own, self.shown) for own in self.own):  # or nothing comes back
                self._put(self.own)

    # ---- gradients -----------------------------------------------------------------------------------------------

    def _train(self) -> None:
        training = self.program.training
        self._backward(0.5 if training == "accumulates" else 1.0)
        if training == "sam":
            self._halve("first_step")
            self._backward()
        for toy in self.toys:
            toy.steps += 1
        if training == "sam":
            self._halve("second_step")
        elif training == "by hand":
            for toy, optimizer in zip(self.toys, self.optimizers, strict=True):
                toy.step_without(optimizer)
        if training in ("sam", "by hand") and not all("none" in toy.effects for toy in self.toys):
            self._synchronize()

    def _halve(self, half: str) -> None:
        for optimizer in self.optimizers:
            getattr(optimizer, half)()

    def _backward(self, factor: float = 1.0) -> None:
        for toy in self.toys:
            toy.zero_grad()
            if not toy.effects & _SKIPS:
                (toy.loss() * factor).backward()
        for group in self.groups:
            for same in zip(*(self.toys[rank].parameters() for rank in group), strict=True):
                gradients = [p.grad for p in same if p.grad is not None]
                for parameter in same if gradients else ():
                    parameter.grad = sum(gradients) / len(group)  # type: ignore[assignment]

    # ---- a step --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        before = self.flat
        for optimizer in self.optimizers:
            optimizer.step()
        nodes = self.program.nodes
        if self.scheme == "gossip" and len(nodes) > 1:
            share = {rank: len(nodes) * len(node) / self.program.world for node in nodes for rank in node}
            moves = [new - old for new, old in zip(self.flat, before, strict=True)]
            self._put([old + share[rank] * move for rank, (old, move) in enumerate(zip(before, moves, strict=True))])
        self._synchronize()

    def _synchronize(self) -> None:
        self.steps += 1
        self.step_in_epoch += 1
        self.unsynced += 1
        scheme, nodes = self.scheme, self.program.nodes
        if len(nodes) == 1:
            return
        if scheme == "daso, warm-up" or (scheme in ("periodic", "periodic, no epochs") and self.step_in_epoch % 2 == 0):
            self._average()
        elif scheme == "daso":
            if self.arriving is not None:
                m = len(nodes)  # the paper's Eq. 1, one step late
                self._put([(2 * own + m * self.arriving) / (2 + m) for own in self.flat])
            self.arriving = self._mean() if self.step_in_epoch % 2 == 1 else None
        elif scheme == "diloco" and self.steps % 2 == 0:
            difference = self.reference - self._mean()
            self.velocity = 0.9 * self.velocity + difference
            self.reference = self.reference - 0.7 * (difference + 0.9 * self.velocity)
            self._put(self.reference)
        elif scheme == "gossip":
            sends, flat = Ring().send_to(len(nodes), self.steps - 1, 0), self.flat
            heard = [[n, *(m for m, to in enumerate(sends) if n in to)] for n in range(len(nodes))]
            mixed = [torch.stack([flat[nodes[m][0]] for m in sources]).mean(0) for sources in heard]
            self._put([mixed[n] for n, node in enumerate(nodes) for _ in node])

    def _average(self) -> None:
        self._put(self._mean())
        self.unsynced = 0

    def _begin_from(self, values: Tensor) -> None:
        self._put(values)
        self.reference, self.arriving, self.unsynced = self._mean(), None, 0

    def _end_epoch(self) -> None:
        if self.unsynced and self.scheme in ("periodic", "periodic, epochs", "daso"):
            self._average()
            self.arriving = None

    def _trained_now(self) -> list[str]:
        return [name for name, parameter in self.toys[0].named_parameters() if parameter.requires_grad]

    def _follow(self) -> None:
        """Synchronize if other parameters are trained than before."""
        if (now := self._trained_now()) != self.trained:
            self.trained = now
            self._begin_from(self._mean())
            if "head" not in now:
                self.velocity[3:] = 0.0
