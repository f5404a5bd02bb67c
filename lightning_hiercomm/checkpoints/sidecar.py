"""Sidecars: per-rank shards next to a checkpoint, for a bit-exact resume."""

from __future__ import annotations

import io
import os
import random
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from fsspec.core import url_to_fs
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hiercomm._lightning.saves import with_plain_numbers
from lightning_hiercomm._lightning.tree import fabric
from lightning_hiercomm.checkpoints.durable import base_name
from lightning_hiercomm.checkpoints.formats import FORMAT, check_format
from lightning_hiercomm.comm.dtensor import local, whole
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.shards import reshard
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import RunningScheme, Scheme
from lightning_hiercomm.schemes.optimizer_state import own_state

_REMEDY = "Set checkpoint_replicas=False to resume from the averaged parameters instead."


def replicas_folder(checkpoint_path: Any) -> str:
    """Return the folder of a checkpoint's sidecars, which is in the checkpoint's folder."""
    folder, separator, name = str(checkpoint_path).rpartition("/")
    return f"{folder}{separator}{base_name(name)}.replicas"


def sidecar_name(rank: int) -> str:
    """Return the name of a rank's sidecar, in a folder that is named by the identity of its checkpoint."""
    return f"rank-{rank:04d}"


def sidecar_state(
    run: TrainingRun,
    mid_epoch: bool,
    precision: Mapping[str, Any] | None = None,
    entries: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return this rank's parameters, buffers, optimizer and scheme state, and random states.

    Args:
        run: The run to save.
        mid_epoch: Whether more batches of the epoch follow.
        precision: State of the precision plugin: gradient scalers differ between nodes.
        entries: What callbacks and the module add to the checkpoint on this rank.
    """
    own_values = run.averaged_model.own_values()  # while the module holds the averaged ones
    return {
        "format": FORMAT,
        "nodes": [list(ranks) for ranks in run.topology.nodes],
        "tensors": {name: own_values.get(id(t), t).detach().clone() for name, t in _tensors(run.module).items()},
        "optimizers": [_held_state(own_state(optimizer)) for optimizer in run.optimizers],
        "schemes": [scheme.state_dict() for scheme in run.schemes],
        "gradients": run.gradients.state_dict(),
        "layouts": _layouts(run.schemes),
        "random": random_state(),
        "mid_epoch": mid_epoch,
        "loss": run.loss.state_dict(),
        "precision": dict(precision or {}),
        "entries": dict(entries or {}),
    }


def load_sidecar(
    checkpoint_io: fabric.plugins.CheckpointIO,
    checkpoint_path: Any,
    identity: str | None,
    topology: Topology,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Read and verify this rank's sidecar, and add its ``"path"``; the checkpoint's path may be a link to it.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, has another format or nodes, or is refused by ``weights_only``.
    """
    if identity is None:
        raise ValueError(
            f"{checkpoint_path} has no per-rank state: it was saved without checkpoint_replicas=True, or after the end"
            f" of the run. {_REMEDY}"
        )
    place = os.path.realpath(checkpoint_path) if os.path.islink(checkpoint_path) else checkpoint_path
    path = f"{replicas_folder(place)}/{identity}/{sidecar_name(topology.rank)}"
    try:
        state: dict[str, Any] = checkpoint_io.load_checkpoint(path, map_location="cpu", weights_only=weights_only)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path}, this rank's sidecar of the checkpoint, is missing: a copy of a checkpoint needs its folder"
            f" {replicas_folder(place)}. {_REMEDY}"
        ) from error
    except Exception as error:  # torch raises different errors for different bytes
        raise ValueError(f"{path} cannot be read: {error}. {_REMEDY}") from error
    if _is_damaged(path):
        raise ValueError(f"{path} is damaged: its checksum is wrong. {_REMEDY}")
    check_format(state.get("format") if isinstance(state, dict) else None, path, _REMEDY)
    nodes = [list(ranks) for ranks in topology.nodes]
    if state["nodes"] != nodes:
        raise ValueError(f"{path} was saved by nodes {state['nodes']}, but this run has {nodes}. {_REMEDY}")
    return {**state, "path": path}


@torch.no_grad()
def restore_sidecar(state: Mapping[str, Any], run: TrainingRun) -> None:
    """Restore a sidecar, except for the states of the precision plugin and of random generators.

    Raises:
        ValueError: If it was saved with other parameters, shards, schemes, buckets or codecs.
    """
    module, path, layouts = run.module, state["path"], _layouts(run.schemes)
    own_tensors = run.replicas.not_averaged  # their shapes may differ between ranks
    tensors = _tensors(module)
    before, now = (
        {name: tuple(tensor.shape) for name, tensor in each.items() if name not in own_tensors}
        for each in (state["tensors"], tensors)
    )
    if before != now:
        other = ", ".join(sorted({name for name, _ in before.items() ^ now.items()}))
        raise ValueError(f"{path} was saved by another model: {other} are not the same in both. {_REMEDY}")
    if state["layouts"] != layouts:
        raise ValueError(f"{path} was saved with {state['layouts']}, but this run has {layouts}. {_REMEDY}")
    for name, tensor in tensors.items():
        saved = state["tensors"].get(name, tensor)
        is_replaced = saved.shape != tensor.shape or tensor.layout != torch.strided
        if is_replaced and name in own_tensors and not isinstance(tensor, nn.Parameter):
            owner, _, own_name = name.rpartition(".")
            setattr(module.get_submodule(owner), own_name, saved.to(tensor.device))
            continue
        if saved.shape != tensor.shape:
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)} on this rank, but {tuple(saved.shape)} in its sidecar:"
                f" shard the model as before. {_REMEDY}"
            )
        tensor.copy_(saved)
    for optimizer, optimizer_state in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(_whole_state(optimizer_state, optimizer))
    for scheme, scheme_state in zip(run.schemes, state["schemes"], strict=True):
        scheme.load_state_dict(scheme_state)
    run.gradients.load_state_dict(state["gradients"])
    run.loss.load_state_dict(state["loss"])


def _is_damaged(path: str) -> bool:
    """Return whether a checksum in a file of ``torch.save`` is wrong: ``torch.load`` does not check them."""
    try:
        file_system, place = url_to_fs(path)
    except (ImportError, ValueError):  # a plugin has its own storage, and its own format below
        return False
    with file_system.open(place, "rb") if file_system.isfile(place) else io.BytesIO() as file:
        try:
            return zipfile.is_zipfile(file) and zipfile.ZipFile(file).testzip() is not None
        except Exception:  # in a header
            return True


def random_state() -> dict[str, Any]:
    """Return the random states of torch, Python and NumPy, as tensors and primitives."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,  # of the current device
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the random states."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy.random.set_state(tuple(state["numpy"]))


def _layouts(schemes: Sequence[RunningScheme[Scheme]]) -> list[str]:
    """Return the settings on which the shapes of each scheme's state depend, and how it is divided."""
    layouts = []
    for scheme in schemes:
        config, wire = scheme.config, scheme.wire
        bucket_mb = f"{scheme.replica.bucket_bytes / 2**20:g}"
        values = {"bucket_mb": bucket_mb, "wire": wire.codec, "wire_raw": wire.raw}
        values |= {name: value for name in ("gradients", "fragments") if (value := getattr(config, name, None))}
        layouts.append(f"{type(config).__name__} ({', '.join(f'{name}={value}' for name, value in values.items())})")
    return layouts


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    reshard(module)
    return {name: local(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _held_state(state: dict[str, Any]) -> dict[str, Any]:
    """Replace DTensors in an optimizer's state by this rank's shards: a mesh belongs to one run.

    A placeholder for no optimizer has no state, and wrappers of optimizers may have another layout.
    """
    if "state" not in state:
        return dict(with_plain_numbers(state))
    held: dict[int, dict[str, Any]] = {}
    sharded: list[tuple[int, str]] = []
    for index, values in state["state"].items():
        held[index] = {name: local(value) if isinstance(value, Tensor) else value for name, value in values.items()}
        sharded += [(index, name) for name, value in values.items() if held[index][name] is not value]
    return {**with_plain_numbers(state), "state": held, "sharded": sharded}


def _whole_state(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    if "state" not in state:
        return state
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    values = {index: dict(held) for index, held in state["state"].items()}
    for index, name in state["sharded"]:
        parameter = parameters[index]
        values[index][name] = whole(values[index][name].to(local(parameter).device), parameter)
    return {"state": values, "param_groups": state["param_groups"]}
