"""States as a file gives them back."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_read: set[frozenset[type]] = set()


def reloaded(state: dict[str, Any]) -> dict[str, Any]:
    """What a file gives back of a state: tensors and primitives only.

    torch is slow where it reads nothing else, so it is asked to for the first state of objects of these types.
    """
    file, kinds = io.BytesIO(), frozenset(_kinds(state))
    torch.save(state, file)
    file.seek(0)
    given: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=kinds not in _read)
    _read.add(kinds)
    return given


def _kinds(state: object) -> Iterator[type]:
    yield type(state)
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield type(key)
            yield from _kinds(value)
    elif isinstance(state, list | tuple | set | frozenset):
        for value in state:
            yield from _kinds(value)
