"""Optimizer state of elements with unequal step counts; some were unfrozen later than others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.schemes.optimizer_state import is_elementwise

_BY_ELEMENT = "_by_element"
_IS_KNOWN = "is_known"
_NUMBER = "_number"
"""Ends the names in files of numbers that are no tensors: an optimizer may calculate with them in another precision."""


@dataclass(frozen=True)
class History:
    """The properties that elements must share to be in one optimizer parameter.

    Attributes:
        numbers: Values that all elements share, such as Adam's ``"step"``: name, value and dtype (None for a
            value that is no tensor).
        kinds: Values that each element has for itself: name and dtype.
    """

    numbers: tuple[tuple[str, float, torch.dtype | None], ...] = ()
    kinds: tuple[tuple[str, torch.dtype], ...] = ()

    @classmethod
    def of(cls, state: Mapping[str, Any], parameter: Tensor) -> History:
        """Return the history of a parameter's optimizer state; empty before its first step."""
        numbers: list[tuple[str, float, torch.dtype | None]] = []
        kinds: list[tuple[str, torch.dtype]] = []
        for name in sorted(state):
            value = state[name]
            if is_elementwise(value, name, parameter):
                kinds.append((name, value.dtype))
            elif isinstance(value, Tensor) and value.numel() == 1:
                numbers.append((name, value.item(), value.dtype))
            elif isinstance(value, int | float):
                numbers.append((name, value, None))
        return cls(tuple(numbers), tuple(kinds))

    def state(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the optimizer state of elements with this history, given their values by name."""
        numbers = {n: value if dtype is None else torch.tensor(value, dtype=dtype) for n, value, dtype in self.numbers}
        return {**{name: values[name] for name, _ in self.kinds}, **numbers}


@dataclass(frozen=True)
class ElementRun:
    """A number of consecutive elements with the same history."""

    numel: int
    history: History


def between(runs: Iterable[ElementRun], start: int, end: int) -> list[ElementRun]:
    """Return the runs of elements ``start`` to ``end`` (exclusive), where ``runs`` begin with element 0."""
    found, offset = [], 0
    for run in runs:
        first, last = max(start, offset), min(end, offset + run.numel)
        if first < last:
            found.append(ElementRun(last - first, run.history))
        offset += run.numel
    return found


def joined(runs: Iterable[ElementRun]) -> list[ElementRun]:
    """Merge consecutive runs of the same history."""
    long: list[ElementRun] = []
    for run in runs:
        if long and long[-1].history == run.history:
            long[-1] = ElementRun(long[-1].numel + run.numel, run.history)
        else:
            long.append(run)
    return long


@dataclass
class TensorState:
    """The optimizer state of one tensor, whose elements may have different histories.

    Attributes:
        values: The values of each element by name, in the tensor's shape; zero where an element has none.
        runs: The runs of all elements, in their order.
        other_histories: The histories of other ranks' shards of the tensor, if it is sharded inside the node.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    runs: list[ElementRun] = field(default_factory=list)
    other_histories: frozenset[History] = frozenset()

    def to_file(self, like: Tensor) -> dict[str, Tensor]:
        """Return the state in the layout of a single-process optimizer; by element if histories differ.

        Args:
            like: The tensor.
        """
        histories = self.other_histories | {run.history for run in self.runs}
        if len(histories) == 1:
            (history,) = histories
            state = {name: self.values[name] for name, _ in history.kinds}
            return state | {_in_file(name, dtype): _tensor(value, dtype) for name, value, dtype in history.numbers}
        kinds = dict(sorted({kind for history in histories for kind in history.kinds}, key=str))
        saved = {name: self.values.get(name, torch.zeros_like(like, dtype=dtype)) for name, dtype in kinds.items()}
        numbers = {
            (name, dtype): _tensor(v, dtype).dtype for history in histories for name, v, dtype in history.numbers
        }
        lengths = torch.tensor([run.numel for run in self.runs], device=like.device)

        def by_element(of_runs: Sequence[float], dtype: torch.dtype | None) -> Tensor:
            return torch.tensor(of_runs, dtype=dtype, device=like.device).repeat_interleave(lengths).view(like.shape)

        for (name, dtype), in_file in sorted(numbers.items(), key=str):
            of_runs = [next((v for n, v, _ in run.history.numbers if n == name), 0) for run in self.runs]
            saved[_in_file(name, dtype) + _BY_ELEMENT] = by_element(of_runs, in_file)
        saved[_IS_KNOWN + _BY_ELEMENT] = by_element([run.history != History() for run in self.runs], torch.bool)
        return saved

    @classmethod
    def from_file(cls, saved: Mapping[str, Tensor], like: Tensor) -> TensorState:
        """Undo :meth:`to_file`."""
        by_element = {
            n.removesuffix(_BY_ELEMENT): v.cpu().view(-1) for n, v in saved.items() if n.endswith(_BY_ELEMENT)
        }
        rest: dict[str, Any] = {
            name.removesuffix(_NUMBER): value.item() if name.endswith(_NUMBER) else value
            for name, value in saved.items()
            if not name.endswith(_BY_ELEMENT)
        }
        whole = History.of(rest, like)
        new = cls({name: rest[name] for name, _ in whole.kinds})
        if not by_element:
            new.runs = [ElementRun(like.numel(), whole)]
            return new
        is_known = by_element.pop(_IS_KNOWN)
        columns = torch.stack([is_known.double(), *(each.double() for each in by_element.values())], 1)
        rows, lengths = torch.unique_consecutive(columns, return_counts=True, dim=0)
        for row, numel in zip(rows.tolist(), lengths.tolist(), strict=True):
            numbers = [_number(name, by_element[name].dtype, v) for name, v in zip(by_element, row[1:], strict=True)]
            history = History(tuple(sorted(numbers)), whole.kinds) if row[0] else History()
            new.runs.append(ElementRun(numel, history))
        return new


def _in_file(name: str, dtype: torch.dtype | None) -> str:
    return name if dtype is not None else name + _NUMBER


def _tensor(value: float, dtype: torch.dtype | None) -> Tensor:
    return torch.tensor(value, dtype=dtype or (torch.float64 if isinstance(value, float) else torch.int64))


def _number(name: str, dtype: torch.dtype, value: float) -> tuple[str, float, torch.dtype | None]:
    """Return a number of a history from its column in a file."""
    if not name.endswith(_NUMBER):
        return name, value, dtype
    return name.removesuffix(_NUMBER), value if dtype.is_floating_point else int(value), None
