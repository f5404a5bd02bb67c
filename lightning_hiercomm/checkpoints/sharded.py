"""Checkpoints of a sharded model: directories of shards, and the states of its optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.optim import Optimizer

from lightning_hiercomm._lightning.saves import METADATA_FILENAME
from lightning_hiercomm.checkpoints import KEY
from lightning_hiercomm.checkpoints.durable import DurableCheckpointIO, remove, replace, unfinished
from lightning_hiercomm.comm.dtensor import DTensor, local, whole
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.torch import connect_torch
from lightning_hiercomm.nodes.connect import process_group
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import trained_by
from lightning_hiercomm.schemes.optimizer_state import evaluates_loss, is_placeholder


def save_directory(checkpoint: dict[str, Any], path: Path, topology: Topology) -> None:
    """Write a directory that ``ModelParallelStrategy`` also loads; collective.

    The ranks of node 0 write it: all nodes hold the same model, and optimizer states of one node are enough. It is
    written to another name first, so that an earlier directory stays complete until then. Sharded state is removed from
    ``checkpoint``.
    """
    state = {"state_dict": checkpoint.pop("state_dict"), KEY: {}}
    for index, optimizer_state in enumerate(checkpoint.pop("optimizer_states", [])):
        state[f"optimizer_{index}"] = optimizer_state
    for key, name, values in _outer_state(checkpoint, DTensor):
        state[KEY][key] = values[name]
        values[name] = str(values[name].dtype).removeprefix("torch.")
    intra = connect_torch(Meter())(topology.nodes, "intra") if topology.is_closed else topology.intra  # after fit
    assert intra is not None
    is_first, temporary = topology.rank == 0, unfinished(path)
    try:
        if 0 in topology.nodes[topology.node]:
            if is_first:
                remove(temporary)  # left by a writer that died
                temporary.mkdir(parents=True)
            intra.barrier()
            save(state, checkpoint_id=temporary, process_group=process_group(intra))
            if is_first:
                DurableCheckpointIO().save_checkpoint(checkpoint, temporary / METADATA_FILENAME)
                replace(path, temporary)
    except BaseException:
        if is_first:
            remove(temporary)
        raise
    finally:
        if topology.is_closed:
            intra.close()


def load_sharded_state(checkpoint: Mapping[str, Any], path: Path, optimizers: Sequence[Optimizer]) -> None:
    """Load the sharded state of schemes from a directory into ``checkpoint``; collective.

    A checkpoint that was read from a file has that state already.
    """
    parameters = [trained_by(optimizer) for optimizer in optimizers]
    state: dict[str, Any] = {}
    for key, name, values in _outer_state(checkpoint, str):
        scheme, parameter, _ = key.split(".")
        like = parameters[int(scheme)][int(parameter)]
        values[name] = whole(torch.empty_like(local(like), dtype=getattr(torch, values[name])), like)
        state[key] = values[name]
    if state:
        load({KEY: state}, checkpoint_id=path)


def whole_on_rank_zero(checkpoint: Mapping[str, Any], rank: int) -> None:
    """Replace sharded state of the schemes by whole tensors, on rank 0 only; collective over each node."""
    for _, name, values in _outer_state(checkpoint, DTensor):
        values[name] = values[name].full_tensor().cpu()
        if rank != 0:
            del values[name]


def _outer_state(checkpoint: Mapping[str, Any], kind: type) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the values of a kind in the state of outer optimizers: a key, a name, and the dictionary that holds it."""
    for index, schedule in enumerate(checkpoint.get(KEY, {}).get("schemes", ())):
        for place, state in enumerate(schedule.get("outer", {}).get("state", ())):
            for name in [name for name, value in state.items() if isinstance(value, kind)]:
                yield f"{index}.{place}.{name}", name, state


def load_optimizers(
    path: Path, states: Sequence[Mapping[str, Any]], module: nn.Module, optimizers: Sequence[Optimizer], strict: bool
) -> None:
    """Load optimizer states from a file, whose whole ``states`` are given, or a directory. Collective.

    The same parameters require gradients as in the saved run. With ``strict``, every parameter must have a state.

    Raises:
        ValueError: If a file has states of another number of optimizers, or torch cannot load one.
    """
    for optimizer in optimizers:
        if evaluates_loss(optimizer):  # torch calls step() without a closure to create its state
            raise ValueError(
                f"the state of {type(optimizer).__name__} in {path} cannot be resumed where parameters are sharded:"
                " restart from its weights (the state_dict in it), or train with HierarchicalStrategy"
            )
    if path.is_dir():
        options = StateDictOptions(cpu_offload=True, strict=strict)
        for index, optimizer in enumerate(optimizers):
            if is_placeholder(optimizer):
                continue
            held = {f"optimizer_{index}": get_optimizer_state_dict(module, optimizer)}
            load(held, checkpoint_id=path)
            set_optimizer_state_dict(module, optimizer, optim_state_dict=held[f"optimizer_{index}"], options=options)
        return
    if len(states) != len(optimizers):
        raise ValueError(
            f"the checkpoint {path} holds the states of {len(states)} optimizers, but this run has {len(optimizers)}:"
            " resume from one that was saved with save_weights_only=False, by a run with as many"
        )
    options = StateDictOptions(broadcast_from_rank0=True, full_state_dict=True, strict=strict)
    for optimizer, state in zip(optimizers, states, strict=True):
        if state.get("state"):
            named = _named(state, optimizer, module)
            set_optimizer_state_dict(module, optimizer, optim_state_dict=named, options=options)
        else:  # torch does not load param groups without state, for instance of SGD without momentum
            optimizer.load_state_dict(dict(state))


def _named(state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return a whole state keyed by parameter names, as torch loads it."""
    own = held_by(optimizer)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    fits = numbers == list(range(len(own))) and all(
        value.shape in (own[number].shape, ())
        for number, held in state["state"].items()
        for value in held.values()
        if isinstance(value, Tensor)
    )
    if fits:  # otherwise the numbers are the module's
        state = renumbered(state, optimizer, before=own, after=list(module.parameters()))
    named: dict[str, Any] = FullyShardedDataParallel.rekey_optim_state_dict(
        dict(state), OptimStateKeyType.PARAM_NAME, module
    )
    return named


def renumbered(
    state: Mapping[str, Any], optimizer: Optimizer, before: Sequence[Tensor], after: Sequence[Tensor]
) -> dict[str, Any]:
    """Return a whole state of an optimizer with its parameters numbered by their places in another list.

    ``Optimizer.state_dict`` numbers those :func:`held_by` it, Lightning those of the module.
    """
    place = {id(parameter): index for index, parameter in enumerate(after)}
    groups = [
        {**saved, "params": [place[id(parameter)] for parameter in group["params"]]}
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    values = {place[id(before[number])]: value for number, value in state["state"].items()}
    return {"state": values, "param_groups": groups}


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the optimizer's parameters."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
