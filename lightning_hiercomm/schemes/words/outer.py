"""Merged how: an outer optimizer takes the way that the nodes went for a gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_hiercomm.arguments import checked_arguments
from lightning_hiercomm.nodes.bucket import Bucket
from lightning_hiercomm.schemes.carriers.base import Carrier
from lightning_hiercomm.schemes.carriers.in_flight import Move
from lightning_hiercomm.schemes.optimizer_state import class_names, is_elementwise, needs_whole_tensors
from lightning_hiercomm.schemes.words.merging import Merge, Replace

OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


class OuterOptimizer(Merge):
    """The difference between the last agreed parameters and the nodes' mean is a gradient for another optimizer.

    With a the last agreed (outer) parameters, equal on all nodes, and W_m the nodes' weights::

        d := sum_m W_m (a - x_m)
        a := outer(a, d)
        x := keep_local x + (1 - keep_local) a

    Each rank keeps a, and the optimizer's state, for its own part of the model, and steps that part before the node
    shares it: one copy of each per node, not per rank.

    Source: Douillard et al. 2023, "DiLoCo", Algorithm 1; Douillard et al. 2025, "Streaming DiLoCo", Algorithm 2.

    Args:
        optimizer: Makes any ``torch.optim`` optimizer that treats every element by itself. Default: SGD with learning
            rate 0.7 and Nesterov momentum 0.9, the papers' own.
        scheduler: Makes a scheduler of its learning rate, which steps once when all parts have been merged.
        keep_local: Weight of what a node has become by itself in what it goes on with, from 0 to 1; the paper's alpha.

    Raises:
        ValueError: If ``keep_local`` is out of range; when the optimizer is made, if it needs whole tensors.
    """

    keeps_agreed = True

    @checked_arguments
    def __init__(
        self,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        keep_local: float = 0.0,
    ) -> None:
        self._make_optimizer = optimizer or partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
        self._make_scheduler = scheduler
        self._mix = Replace(keep_local)
        self.ends_in_agreement = self._mix.ends_in_agreement
        self.optimizer: Optimizer | None = None
        self._scheduler: LRScheduler | None = None
        self._parts: list[torch.nn.Parameter] = []
        self._carrier: Carrier | None = None

    def __repr__(self) -> str:
        made_by = getattr(self._make_optimizer, "func", self._make_optimizer)
        return f"{type(self).__name__}({getattr(made_by, '__name__', made_by)}, keep_local={self.keep_local})"

    def __deepcopy__(self, memo: dict[int, Any]) -> OuterOptimizer:
        # what makes optimizers is shared: LightningCLI's leads to its parser, and from there to the Trainer
        for shared in (self._make_optimizer, self._make_scheduler):
            memo[id(shared)] = shared
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        vars(new).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return new

    @property
    def keep_local(self) -> float:
        """Weight of what a node has become by itself."""
        return self._mix.keep_local

    @property
    def learning_rate(self) -> float:
        """The present one."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer is not None else 0.0

    def attach(self, carrier: Carrier) -> None:
        """Step the last agreed values of ``carrier`` from now on; the state of values known before is kept."""
        state, schedule = self._state_by_tensor(), self._schedule()
        self._carrier = carrier
        self._parts = [torch.nn.Parameter(anchor) for anchor in carrier.anchors]
        # an optimizer refuses to be made without parameters, as a rank in no lane may be
        self.optimizer = self._make_optimizer(self._parts or [torch.nn.Parameter(torch.zeros(1))])
        if needs_whole_tensors(self.optimizer) or "lbfgs" in class_names(self.optimizer):
            raise ValueError(
                f"the outer optimizer {type(self.optimizer).__name__} needs whole tensors, but every rank steps a part"
                " of the model: use one that treats elements by themselves, such as SGD, Adam or AdamW"
            )
        self._scheduler = self._make_scheduler(self.optimizer) if self._make_scheduler is not None else None
        self._load(state, schedule)

    def land(self, index: int, agreed: Tensor, difference: Tensor) -> Tensor:
        """Step a bucket's last agreed values, given how far the nodes' mean is from them."""
        optimizer, part = self.optimizer, self._parts[index]
        if optimizer is not None:
            part.grad = difference.neg().to(part.dtype)
            optimizer.step()
            part.grad = None
        return agreed

    def __call__(self, bucket: Bucket, move: Move, staleness: int, nodes: int) -> None:
        self._mix.at_once(bucket, move.flat)

    def at_once(self, bucket: Bucket, mean: Tensor) -> None:
        self._mix.at_once(bucket, mean)

    def end_round(self) -> None:
        """All parts have been merged once more: the scheduler steps."""
        if self._scheduler is not None:
            self._scheduler.step()

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """All state, as the optimizer of one process would hold it for these parameters. Collective over the node."""
        state = self._state_by_tensor()
        return {"state": [state.get(id(parameter), {}) for parameter in parameters], **self._schedule()}

    def load_state_dict(self, state: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        """Restore :meth:`state_dict`, on any number of nodes and ranks."""
        held = {id(parameter): saved for parameter, saved in zip(parameters, state["state"], strict=True)}
        self._load(held, state)

    def part_states(self) -> list[dict[str, Any]]:
        """The optimizer's state for this rank's part of every bucket, as it is: one step for each part, say."""
        if self.optimizer is None:
            return []
        held: list[Mapping[str, Any]] = [self.optimizer.state.get(part, {}) for part in self._parts]
        return [{n: v.clone() if isinstance(v, Tensor) else v for n, v in own.items()} for own in held]

    def load_part_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore :meth:`part_states` (of a run with the same topology and buckets)."""
        if self.optimizer is None:
            return
        for part, saved in zip(self._parts, states, strict=True):
            self.optimizer.state[part].clear()
            for name, value in saved.items():
                if isinstance(value, Tensor):  # a step may live on the CPU
                    value = value.to(part.device if value.shape == part.shape else value.device, copy=True)
                self.optimizer.state[part][name] = value

    def _schedule(self) -> dict[str, Any]:
        if self.optimizer is None:
            return {}
        learning_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return {
            "learning_rates": learning_rates,
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
        }

    @torch.no_grad()
    def _state_by_tensor(self) -> dict[int, dict[str, Tensor]]:
        """The optimizer's state for whole parameters, by their ``id``. Collective over the node."""
        state: dict[int, dict[str, Tensor]] = {}
        if self._carrier is None or self.optimizer is None:
            return state
        for index, part in enumerate(self._parts):
            bucket = self._carrier.buckets[index]
            held: dict[str, Any] = self.optimizer.state.get(part, {})
            for name in sorted(held):
                value: object = held[name]
                if not isinstance(value, Tensor):
                    continue
                if not is_elementwise(value, name, part):  # one number for all elements, such as Adam's step
                    for piece in bucket.pieces:
                        state.setdefault(id(piece.tensor), {})[name] = value.clone()
                    continue
                for piece, values in bucket.split(self._carrier.whole(index, value)):
                    of_tensor = state.setdefault(id(piece.tensor), {})
                    if name not in of_tensor:
                        of_tensor[name] = torch.zeros(piece.tensor.shape, dtype=value.dtype, device=value.device)
                    of_tensor[name].view(-1)[piece.start :][: piece.length] = values
        return state

    @torch.no_grad()
    def _load(self, state: Mapping[int, Mapping[str, Tensor]], schedule: Mapping[str, Any]) -> None:
        """Take this rank's part of a state for whole parameters, and where the schedule of the learning rate is."""
        carrier, optimizer = self._carrier, self.optimizer
        if carrier is None or optimizer is None:
            return
        for index, part in enumerate(self._parts):
            bucket = carrier.buckets[index]
            known = [state.get(id(piece.tensor), {}) for piece in bucket.pieces]
            for name in sorted({name for of_tensor in known for name in of_tensor}):
                piece, value = next(
                    (p, of_tensor[name]) for p, of_tensor in zip(bucket.pieces, known, strict=True) if name in of_tensor
                )
                if not is_elementwise(value, name, piece.tensor):
                    optimizer.state[part][name] = value.clone()
                    continue
                flat = bucket.empty(carrier.parts_of(index), dtype=value.dtype)
                for (p, values), of_tensor in zip(bucket.split(flat), known, strict=True):
                    if name in of_tensor:
                        values.copy_(of_tensor[name].reshape(-1)[p.start :][: p.length])
                    else:
                        values.zero_()
                optimizer.state[part][name] = carrier.carried(flat, index).clone()
        for group, learning_rate in zip(optimizer.param_groups, schedule.get("learning_rates", ()), strict=False):
            group["lr"] = learning_rate
        if self._scheduler is not None and schedule.get("scheduler") is not None:
            self._scheduler.load_state_dict(schedule["scheduler"])
