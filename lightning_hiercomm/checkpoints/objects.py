"""Python objects in a rank's state: stored apart from tensors and primitives, and unpickled only as the user allows."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor, nn

Place = list[Any]
"""Keys and indices on the way to a value in nested dictionaries and lists."""


def take_out(state: dict[str, Any]) -> tuple[dict[str, Any], list[Place], list[Any]]:
    """Replace whatever is not made of tensors and primitives with None.

    Returns:
        A copy of the nested containers, the places of the objects in it, and the objects.
    """
    places: list[Place] = []
    objects: list[Any] = []

    def without_objects(value: Any, place: Place) -> Any:
        if type(value) in (dict, OrderedDict) and all(map(_is_plain, value)):
            same = copy.copy(value)  # an OrderedDict may have attributes: a state_dict's metadata
            for key, item in value.items():
                same[key] = without_objects(item, [*place, key])
            return same
        if _is_plain(value):
            return value
        if type(value) is list and all(type(item) in (dict, OrderedDict, list) for item in value):
            return [without_objects(item, [*place, index]) for index, item in enumerate(value)]
        places.append(place)
        objects.append(value)
        return None

    return without_objects(state, []), places, objects


def put_back(state: dict[str, Any], places: Sequence[Place], objects: Sequence[Any]) -> None:
    """Undo :func:`take_out`, in place."""
    for (*containers, last), value in zip(places, objects, strict=True):
        holder: Any = state
        for key in containers:
            holder = holder[key]
        holder[last] = value


def pickled(objects: Sequence[Any], places: Sequence[Place]) -> Tensor:
    """Pickle objects into one tensor of bytes, so that whatever reads the file need not know their classes.

    Raises:
        TypeError: If one cannot be pickled, naming its owner.
    """
    try:
        return _bytes_of(list(objects))
    except Exception:
        for value, place in zip(objects, places, strict=True):
            try:
                _bytes_of(value)
            except Exception as error:
                raise TypeError(
                    f"{owner(place)} holds a {type(value).__name__} that cannot be saved ({error}): leave it out of its"
                    " state"
                ) from error
        raise


def unpickled(
    data: Tensor, places: Sequence[Place], checkpoint_io: CheckpointIO, weights_only: bool | None, path: str
) -> list[Any]:
    """Undo :func:`pickled` with what reads the checkpoint itself, which may trust files by a rule of its own.

    Raises:
        pickle.UnpicklingError: If ``weights_only`` loading refuses one of the classes.
    """
    try:
        objects: list[Any] = _loaded(data, checkpoint_io, weights_only)
    except pickle.UnpicklingError as error:
        owners = ", ".join(dict.fromkeys(map(owner, places)))
        raise pickle.UnpicklingError(
            f"{path} holds Python objects of {owners}, not all of which weights_only=True loads. Resume with"
            " Trainer.fit(..., weights_only=False) if you trust the file, or allow their classes with"
            f" torch.serialization.add_safe_globals. {error}"
        ) from error
    return objects


def _loaded(data: Tensor, checkpoint_io: CheckpointIO, weights_only: bool | None) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "objects.ckpt"
        file.write_bytes(data.numpy().data)
        try:
            return checkpoint_io.load_checkpoint(file, map_location="cpu", weights_only=weights_only)
        except pickle.UnpicklingError:
            raise
        except Exception:  # a plugin with a format of its own, or an object that cannot be made: torch raises it again
            return torch.load(file, map_location="cpu", weights_only=weights_only)


def owner(place: Place) -> str:
    """Name what saved the value at a place in a rank's state, for people."""
    kind, *rest = place
    if kind == "entries" and rest:
        key, *rest = rest
        return f"callback {rest[0]}" if key == "callbacks" and rest else f"checkpoint[{key!r}]"
    names = {"optimizers": "an optimizer", "precision": "the precision plugin", "schemes": "a scheme"}
    return names.get(kind, str(kind))


def _bytes_of(value: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _is_plain(value: object) -> bool:
    """Return whether a value is made of tensors and primitives."""
    if type(value) in (dict, OrderedDict):
        return all(_is_plain(part) for item in value.items() for part in item)  # type: ignore[attr-defined]
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return value is None or type(value) in (bool, int, float, str, bytes, Tensor, nn.Parameter)
