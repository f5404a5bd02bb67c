"""The outer optimizer, whose gradient is the difference between reference parameters and the nodes' mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_hiercomm.schemes.components.merges import Replace
from lightning_hiercomm.schemes.components.tensor_state import BY_ELEMENT, IS_KNOWN, by_element, in_runs
from lightning_hiercomm.schemes.optimizer_state import (
    copied,
    evaluates_loss,
    is_elementwise,
    keep_state_here,
    wraps_another,
)
from lightning_hiercomm.schemes.optimizer_trial import why_not_in_parts
from lightning_hiercomm.schemes.reducers.base import Reducer

OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]
_States = Sequence[Sequence[tuple[int, Mapping[str, Any]]]]
"""The length and optimizer state of every run of a rank's shard, by bucket."""


class OuterOptimizer(Replace):
    """Merge by an outer optimizer, with the reference parameters minus the nodes' mean as its gradient.

    With a the reference (outer) parameters, equal on all nodes, and W_m the nodes' weights::

        d := sum_m W_m (a - x_m)
        a := outer(a, d)
        x := keep_local x + (1 - keep_local) a

    Each rank stores a and the optimizer's state for its own shard of the model, and updates the shard before the node
    gathers it. So a node has one copy of each. Elements that were unfrozen later and have taken fewer steps have a
    separate optimizer state. So do buckets, which are stepped one after the other.

    Source: Douillard et al. 2023, "DiLoCo", Algorithm 1; Douillard et al. 2025, "Streaming DiLoCo", Algorithm 2.

    Args:
        optimizer: Function that creates the optimizer from parameters: any whose update is elementwise and that only
            changes its state and the parameters, which a trial on other tensors checks. Default: SGD with learning rate
            0.7 and Nesterov momentum 0.9, the papers' own.
        keep_local: Weight of a node's own parameters in the merged ones, from 0 to 1; the paper's alpha. The paper uses
            0.5 with staleness, as ``DiLoCo(staleness=...)`` does. Default: 0.

    Raises:
        ValueError: If ``keep_local`` is out of range; when the optimizer is made, if its update is not elementwise.
    """

    keeps_reference = True

    def __init__(
        self,
        optimizer: OptimizerFactory | None = None,
        keep_local: float = 0.0,
    ) -> None:
        self.make_optimizer = optimizer or partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
        super().__init__(keep_local)

    def __repr__(self) -> str:
        made_by = getattr(self.make_optimizer, "func", self.make_optimizer)
        return f"{type(self).__name__}({getattr(made_by, '__name__', made_by)}, keep_local={self.keep_local})"

    def build(self, reducer: Reducer, before: RunningOuterOptimizer | None = None) -> RunningOuterOptimizer:
        """Make the outer optimizer of a reducer's reference parameters. Collective over the node.

        Args:
            reducer: The reducer that holds the buckets and their reference parameters.
            before: The previous outer optimizer, perhaps with other buckets; its state is kept.

        Raises:
            ValueError: If the optimizer's update is not elementwise.
        """
        if before is None:
            self._check(next((each.device for each in reducer.references), torch.device("cpu")))
        return RunningOuterOptimizer(self, reducer, before)

    def _check(self, device: torch.device) -> None:
        tried: list[Optimizer] = []

        def make(parameters: list[torch.nn.Parameter]) -> Optimizer:
            tried.append(self.make_optimizer(parameters))
            return tried[-1]

        reason = why_not_in_parts(make, device, keeps_attributes=True)
        for optimizer in tried[:1]:
            if evaluates_loss(optimizer):
                reason = "it evaluates the loss in its step"
            elif wraps_another(optimizer):
                reason = "it wraps another optimizer, whose state it does not hold"
            elif len(optimizer.param_groups) != 1:
                reason = "it has several param groups"
        if reason is not None:
            made_by = getattr(self.make_optimizer, "func", self.make_optimizer)
            kind = type(tried[0]).__name__ if tried else getattr(made_by, "__name__", repr(made_by))
            raise ValueError(
                f"the outer optimizer {kind} cannot update the model's shards, one on each rank: {reason}. Use an"
                " elementwise one, such as SGD, Adam or AdamW"
            )


class RunningOuterOptimizer:
    """The outer optimizer of this rank's shard of the reference parameters, with its state.

    Args:
        config: The configuration, which makes the optimizer.
        reducer: See :meth:`OuterOptimizer.build`.
        before: See :meth:`OuterOptimizer.build`.

    Attributes:
        optimizer: The optimizer itself.
    """

    def __init__(self, config: OuterOptimizer, reducer: Reducer, before: RunningOuterOptimizer | None = None) -> None:
        self._config = config
        self._reducer = reducer
        self._begin(self._own_states({} if before is None else before._state_by_tensor()))

    def update_reference(self, index: int, reference: Tensor, difference: Tensor) -> Tensor:
        """Update a bucket's reference parameters, given the nodes' mean minus them."""
        (group,) = self.optimizer.param_groups
        parameters, runs = group["params"], self._runs[index]
        # 0.0 - x is never -0.0, whose step would turn a reference value of -0.0 into 0.0
        gradients = (0.0 - difference).to(reference.dtype).split([run.numel() for run in runs])
        for run, gradient in zip(runs, gradients, strict=True):
            run.grad = gradient
            keep_state_here(self.optimizer, run)
        group["params"] = runs  # some optimizers change those without gradients, too
        if runs:
            self.optimizer.step()
        group["params"] = parameters
        for run in runs:
            run.grad = None
        return reference

    def undo_point(self) -> Callable[[], None]:
        """Store the state; return a callback that restores it."""
        return partial(self.load_shard_states, self.shard_states())

    # ---- state ---------------------------------------------------------------------------------------------------

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Return all state for these parameters in the layout of one process. Collective over the node.

        If elements of a parameter have taken different numbers of steps, ``"step_by_element"`` replaces ``"step"``.
        """
        known = self._state_by_tensor()
        return {"state": [known.get(id(parameter), {}) for parameter in parameters]}

    def load_state_dict(self, state: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        """Restore :meth:`state_dict`, on any number of nodes and ranks."""
        known = dict(zip(map(id, parameters), state["state"], strict=True))
        self._begin(self._own_states(known))

    def shard_states(self) -> list[list[dict[str, Any]]]:
        """Return the optimizer's state for this rank's shard of every bucket, by runs of equally many steps."""
        return [
            [{"numel": run.numel(), "state": {n: copied(v) for n, v in self._held(run).items()}} for run in runs]
            for runs in self._runs
        ]

    def load_shard_states(self, states: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Restore :meth:`shard_states` (of a run with the same topology and buckets)."""
        self._begin([[(run["numel"], run["state"]) for run in runs] for runs in states])

    def _held(self, run: torch.nn.Parameter) -> Mapping[str, Any]:
        """Return the optimizer's state of a run."""
        keep_state_here(self.optimizer, run)  # it was allocated on the stream of an exchange
        state: Mapping[Any, Mapping[str, Any]] = self.optimizer.state
        return state.get(run, {})

    def _begin(self, states: _States) -> None:
        """Make the runs of this rank's shard of every bucket, and their optimizer."""
        # consecutive elements that have taken equally many steps
        self._runs = [
            [torch.nn.Parameter(run) for run in reference.split([numel for numel, _ in runs])] if runs else []
            for reference, runs in zip(self._reducer.references, states, strict=True)
        ]
        # an optimizer needs a parameter, and a rank in no inter-node process group has none
        some = [run for runs in self._runs for run in runs] or [torch.nn.Parameter(torch.zeros(1))]
        self.optimizer = self._config.make_optimizer(some)
        (group,) = self.optimizer.param_groups
        keeps_numbers_there = bool(group.get("capturable") or group.get("fused"))
        for runs, of_runs in zip(self._runs, states, strict=True):
            for run, (_, state) in zip(runs, of_runs, strict=True):
                for name, value in state.items():
                    if isinstance(value, Tensor):  # a number, such as the step, may be on the CPU
                        is_there = keeps_numbers_there or is_elementwise(value, name, run)
                        value = value.to(run.device if is_there else value.device, copy=True)
                    self.optimizer.state[run][name] = value

    @torch.no_grad()
    def _state_by_tensor(self) -> dict[int, dict[str, Tensor]]:
        """Return the optimizer's state of whole parameters, by their ``id``. Collective over the node.

        If all elements share their numbers, such as Adam's ``"step"``, each state is that of an optimizer in one
        process. Otherwise numbers are repeated for every element.
        """
        reducer = self._reducer
        columns = [[by_element(self._held(run), run) for run in runs] for runs in self._runs]
        own_kinds: set[tuple[torch.dtype, str, torch.dtype]] = set()
        own_numbers: set[tuple[tuple[str, torch.dtype, float], ...]] = set()
        for bucket, of_runs in zip(reducer.buckets, columns, strict=False):
            for own in of_runs:
                own_kinds.update((bucket.dtype, name, values.dtype) for name, values in own.items())
                numbers = sorted((name, values) for name, values in own.items() if name.endswith(BY_ELEMENT))
                own_numbers.add(tuple((name, values.dtype, values[0].item()) for name, values in numbers))
        everyone = reducer.topology.intra.all_gather_object((own_kinds, own_numbers))
        kinds, histories = (set().union(*each) for each in zip(*everyone, strict=True))
        shared: dict[str, Tensor] = {}
        if len(histories) == 1:
            shared = {
                name.removesuffix(BY_ELEMENT): torch.tensor(value, dtype=dtype)
                for name, dtype, value in histories.pop()
                if name != IS_KNOWN
            }
            kinds = {kind for kind in kinds if not kind[1].endswith(BY_ELEMENT)}
        known: dict[int, dict[str, Tensor]] = {}
        for index, reference in enumerate(reducer.references):
            bucket = reducer.buckets[index]
            for piece in bucket.slices:
                known.setdefault(id(piece.tensor), dict(shared))
            for _, name, dtype in sorted((kind for kind in kinds if kind[0] == bucket.dtype), key=str):
                part, offset = torch.zeros_like(reference, dtype=dtype), 0
                for run, own in zip(self._runs[index], columns[index], strict=True):
                    if name in own:
                        part[offset:][: run.numel()] = own[name]
                    offset += run.numel()
                for piece, values in bucket.split(reducer.whole(index, part)):
                    state = known[id(piece.tensor)]
                    if name not in state:
                        state[name] = values.new_zeros(piece.tensor.shape)
                    state[name].view(-1)[piece.start :][: piece.length] = values
        return known

    @torch.no_grad()
    def _own_states(self, known: Mapping[int, Mapping[str, Tensor]]) -> _States:
        """Return this rank's shard of a state of whole parameters, given by their ``id``."""
        reducer = self._reducer
        states = []
        for index, reference in enumerate(reducer.references):
            bucket, holders = reducer.buckets[index], reducer.holders_of(index)
            pieces = [by_element(known.get(id(piece.tensor), {}), piece.tensor) for piece in bucket.slices]
            own: dict[str, Tensor] = {}
            for name, dtype in {name: values.dtype for columns in pieces for name, values in columns.items()}.items():
                flat = bucket.empty(holders.num_shards, dtype=dtype).zero_()
                for columns, (piece, values) in zip(pieces, bucket.split(flat), strict=True):
                    if name in columns:
                        values.copy_(columns[name].reshape(-1)[piece.start :][: piece.length])
                if name.endswith(BY_ELEMENT):  # padding is in the run of the last element
                    flat[bucket.numel :] = flat[bucket.numel - 1 : bucket.numel]
                own[name] = holders.shard(flat)
            states.append(in_runs(own, reference.numel()))
        return states
