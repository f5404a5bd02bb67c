"""Optimizer state by element, because elements of one tensor may have taken unequal numbers of steps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_hiercomm.schemes.optimizer_state import is_elementwise

BY_ELEMENT = "_by_element"
"""Ends the names of numbers, such as Adam's ``"step"``, that are repeated for every element."""
NUMBER = "_number"
"""Ends the names of numbers that are no tensors: an optimizer may calculate with them in another precision."""
IS_KNOWN = "is_known" + BY_ELEMENT
"""The name of the column that tells which elements have state."""


def by_element(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """Return the optimizer state of a parameter, or what a file holds of it, as columns with a value per element."""
    columns: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, value in state.items():
        if is_elementwise(value, name, parameter) and not name.endswith(NUMBER):
            columns[name] = value
        elif isinstance(value, Tensor) and value.numel() == 1:
            numbers[name] = value.reshape(())
        elif isinstance(value, int | float):
            dtype = torch.float64 if isinstance(value, float) else torch.int64
            numbers[name + NUMBER] = torch.tensor(value, dtype=dtype)
    repeated = {name + BY_ELEMENT: number.expand(parameter.shape) for name, number in numbers.items()}
    if columns or numbers:
        columns.setdefault(IS_KNOWN, torch.tensor(True).expand(parameter.shape))
    return columns | repeated


def in_runs(columns: Mapping[str, Tensor], numel: int) -> list[tuple[int, dict[str, Any]]]:
    """Cut elements where the numbers in their 1-D columns change; return the length and optimizer state of each run."""
    numbers = {name: values.cpu() for name, values in columns.items() if name.endswith(BY_ELEMENT)}
    if not numel or not numbers:
        return [(numel, {})] if numel else []
    begins = torch.zeros(numel, dtype=torch.bool)
    begins[0] = True
    for values in numbers.values():
        bits = values.double().view(torch.int64)  # NaN equals NaN
        begins[1:] |= bits[1:] != bits[:-1]
    runs: list[tuple[int, dict[str, Any]]] = []
    for start, end in pairwise([*begins.nonzero().view(-1).tolist(), numel]):
        state: dict[str, Any] = {}
        if numbers[IS_KNOWN][start]:
            state = {name: values[start:end] for name, values in columns.items() if name not in numbers}
            for name in numbers.keys() - {IS_KNOWN}:
                number, own = name.removesuffix(BY_ELEMENT), numbers[name][start]
                state[number.removesuffix(NUMBER)] = own.item() if number.endswith(NUMBER) else own
        runs.append((end - start, state))
    return runs
