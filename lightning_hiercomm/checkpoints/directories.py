"""Checkpoints of a sharded model: directories to which every rank of a node writes its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_hiercomm._lightning.saves import METADATA_FILENAME
from lightning_hiercomm.checkpoints.durable import DurableCheckpointIO, base_name, remove, replace
from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.dtensor import DTensor, local, whole
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.torch import connect_torch
from lightning_hiercomm.nodes.connect import process_group
from lightning_hiercomm.nodes.topology import Topology
from lightning_hiercomm.run.replicas import trained_by

_KEY = "hiercomm"


def save_directory(checkpoint: dict[str, Any], path: Path, topology: Topology) -> None:
    """Write a directory that ``ModelParallelStrategy`` also loads; collective.

    The ranks of node 0 write it: all nodes hold the same model, and optimizer states of one node are enough. It is
    written to another name first, so that an earlier directory stays complete until then.

    Args:
        checkpoint: What Lightning and the schemes save; sharded state is removed from it.
        path: Of the directory.
        topology: The nodes.
    """
    state = {"state_dict": checkpoint.pop("state_dict"), _KEY: {}}
    for index, optimizer_state in enumerate(checkpoint.pop("optimizer_states", [])):
        state[f"optimizer_{index}"] = optimizer_state
    for place, name, values in _outer_state(checkpoint):
        value = values[name]
        if isinstance(value, DTensor):
            state[_KEY][f"{place}.{name}"] = value
            values[name] = str(value.dtype).removeprefix("torch.")
    intra = topology.intra
    if topology.is_closed:  # after fit
        made = connect_torch(Meter())(topology.nodes, "intra")
        assert made is not None
        intra = made
    try:
        if 0 in topology.nodes[topology.node]:
            _write_directory(state, checkpoint, path, topology.rank, intra)
    finally:
        if topology.is_closed:
            intra.close()


def _write_directory(
    state: dict[str, Any], checkpoint: dict[str, Any], path: Path, rank: int, intra: Communicator
) -> None:
    temporary = path.with_name(f"{base_name(path.name)}.part")
    if rank == 0:
        remove(temporary)  # left by a writer that died
        temporary.mkdir(parents=True)
    intra.barrier()
    try:
        save(state, checkpoint_id=temporary, process_group=process_group(intra))
        if rank == 0:
            DurableCheckpointIO().save_checkpoint(checkpoint, temporary / METADATA_FILENAME)
            replace(path, temporary)
    except BaseException:
        if rank == 0:
            remove(temporary)
        raise


def load_sharded_state(checkpoint: Mapping[str, Any], path: Path, optimizers: Sequence[Optimizer]) -> None:
    """Load the sharded state of schemes from a directory into ``checkpoint``; collective.

    A checkpoint that was read from a file has that state already.
    """
    parameters = [trained_by(optimizer) for optimizer in optimizers]
    state: dict[str, Any] = {}
    for place, name, values in _outer_state(checkpoint):
        value = values[name]
        if isinstance(value, str):
            scheme, parameter = map(int, place.split("."))
            like = parameters[scheme][parameter]
            values[name] = whole(torch.empty_like(local(like), dtype=getattr(torch, value)), like)
            state[f"{place}.{name}"] = values[name]
    if state:
        load({_KEY: state}, checkpoint_id=path)


def whole_on_rank_zero(checkpoint: Mapping[str, Any], rank: int) -> None:
    """Replace sharded state of the schemes by whole tensors, on rank 0 only; collective over each node."""
    for _, name, values in _outer_state(checkpoint):
        value = values[name]
        if isinstance(value, DTensor):
            values[name] = value.full_tensor().cpu()
            if rank != 0:
                del values[name]


def _outer_state(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the state of outer optimizers: a parameter's key, the state's name, and the dictionary that holds it."""
    for index, schedule in enumerate(checkpoint.get(_KEY, {}).get("schemes", ())):
        for place, state in enumerate(schedule.get("outer", {}).get("state", ())):
            for name in list(state):
                yield f"{index}.{place}", name, state
