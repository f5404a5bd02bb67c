"""Sidecars: per-rank shards next to a checkpoint, for a bit-exact resume."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hiercomm._lightning.saves import with_plain_numbers
from lightning_hiercomm.checkpoints import FORMAT
from lightning_hiercomm.comm.dtensor import local, whole
from lightning_hiercomm.run.shards import reshard
from lightning_hiercomm.run.training_run import TrainingRun
from lightning_hiercomm.schemes import RunningScheme, Scheme
from lightning_hiercomm.schemes.optimizer_state import own_state

REMEDY = "Set checkpoint_replicas=False to resume from the averaged parameters instead."


def sidecar_state(run: TrainingRun, mid_epoch: bool, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's parameters, buffers, optimizer and scheme state, and random states.

    Args:
        run: The run to save.
        mid_epoch: Whether more batches of the epoch follow.
        entries: What Lightning, callbacks and the module add to the checkpoint on this rank.
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
        "entries": entries,
    }


@torch.no_grad()
def restore_sidecar(state: Mapping[str, Any], run: TrainingRun) -> None:
    """Restore a sidecar, except for its entries and random states.

    Raises:
        ValueError: If it was saved with other parameters, shards, schemes, buckets or codecs.
    """
    module, path, layouts = run.module, state["path"], _layouts(run.schemes)
    own_buffers = run.replicas.not_averaged & dict(module.named_buffers()).keys()  # their shapes may have changed
    tensors = _tensors(module)
    before, now = (
        {name: tuple(tensor.shape) for name, tensor in each.items() if name not in own_buffers}
        for each in (state["tensors"], tensors)
    )
    if before != now:
        other = ", ".join(sorted({name for name, _ in before.items() ^ now.items()}))
        raise ValueError(f"{path} was saved by another model: {other} are not the same in both. {REMEDY}")
    if state["layouts"] != layouts:
        raise ValueError(f"{path} was saved with {state['layouts']}, but this run has {layouts}. {REMEDY}")
    for name, tensor in tensors.items():
        saved = state["tensors"].get(name, tensor)
        if name in own_buffers and (saved.shape != tensor.shape or tensor.layout != torch.strided):
            owner, _, own_name = name.rpartition(".")
            setattr(module.get_submodule(owner), own_name, saved.to(tensor.device))
        else:
            tensor.copy_(saved)
    for optimizer, optimizer_state in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(_whole_state(optimizer_state, optimizer))
    for scheme, scheme_state in zip(run.schemes, state["schemes"], strict=True):
        scheme.load_state_dict(scheme_state)
    run.gradients.load_state_dict(state["gradients"])
    run.loss.load_state_dict(state["loss"])


def random_state() -> dict[str, Any]:
    """Return the random states of torch, Python and NumPy, as tensors and primitives."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,  # of the current device
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], *rest),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the random states."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])


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
