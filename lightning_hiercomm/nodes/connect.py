"""Finds the nodes of a run, connects them, and checks their backend and their work."""

from __future__ import annotations

import contextlib
import difflib
import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from lightning_hiercomm.comm.base import Communicator, Connect
from lightning_hiercomm.comm.meter import Meter
from lightning_hiercomm.comm.mpi import MPICommunicator, connect_mpi
from lightning_hiercomm.comm.shared_memory import sharing_memory
from lightning_hiercomm.comm.staged import StagedCommunicator, connect_gloo
from lightning_hiercomm.comm.torch import TorchCommunicator, connect_torch, unprofiled
from lightning_hiercomm.nodes.hosts import Place, nodes_by_default, warn_once
from lightning_hiercomm.nodes.topology import Topology, nodes_by_count

_LONGEST_CLOSING = 5.0
_left_behind: list[tuple[Topology, object, int]] = []
"""Topologies of failed runs, with their default process groups and process ids."""


def connect_world(
    rank: int,
    world_size: int,
    place: Place,
    ranks_per_node: int | Sequence[int] | None = None,
    inter_node: Literal["torch", "gloo", "mpi"] = "torch",
    timeout: timedelta | None = None,
) -> Topology:
    """Find the nodes and connect them; collective over the default process group.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        place: The node and host of this rank.
        ranks_per_node: The size of every node, or a list of sizes. Default: see
            :func:`~lightning_hiercomm.nodes.hosts.nodes_by_default`.
        inter_node: The library for traffic between nodes.
        timeout: Of collectives over torch's process groups.

    Returns:
        The nodes, with communicators and a new meter.

    Warns:
        UserWarning: On rank 0, if host names contradict what the cluster environment reports of the nodes.
    """
    world = TorchCommunicator(None, range(world_size), rank, "world", Meter())
    if ranks_per_node is not None:
        nodes = nodes_by_count(ranks_per_node, world_size)
    else:
        nodes, warning = nodes_by_default(world.all_gather_object(place) if world_size > 1 else [place])
        if warning is not None and rank == 0:
            warn_once(warning)
    meter = Meter()
    by_torch = sharing_memory(connect_torch(meter, timeout, launching=unprofiled), timeout)
    if inter_node == "torch":
        connect = by_torch
    elif inter_node == "gloo":
        connect = _between_nodes(connect_gloo(meter, timeout), by_torch)
    else:
        connect = _between_nodes(connect_mpi(meter, rank, world_size), by_torch)
    waits_on_host = inter_node != "torch" or not world.is_nccl
    topology = Topology(nodes, rank, connect, meter, waits_on_host=waits_on_host)
    topology.world.barrier()  # other ranks may still connect over the store of a rank that ends at once
    _close_left_behind()
    return topology


def leave_behind(topology: Topology) -> None:
    """Abandon the topology of a failed run, in which other ranks may be stuck; the next run closes it."""
    topology.is_left_behind = True
    inter = topology.inter.over_host if isinstance(topology.inter, StagedCommunicator) else topology.inter
    if not isinstance(inter, MPICommunicator):  # MPI cannot close communicators in use
        _left_behind.append((topology, dist.group.WORLD, os.getpid()))


def _close_left_behind() -> None:
    """Close abandoned topologies of this process; a fork would wait for its parent's threads forever."""
    own = [each for each in _left_behind if each[2] == os.getpid()]
    _left_behind[:] = [each for each in _left_behind if each[2] != os.getpid()]
    if own:
        closing = threading.Thread(target=_close, args=(own,), daemon=True, name="close-left-behind")
        closing.start()
        closing.join(_LONGEST_CLOSING)


def _close(left: list[tuple[Topology, object, int]]) -> None:
    while left:
        topology, world, _ = left.pop()
        if world is dist.group.WORLD:  # otherwise destroyed together with that group
            with contextlib.suppress(Exception):
                topology.close()


def _between_nodes(inter: Connect, others: Connect) -> Connect:
    def connect(groups: Sequence[Sequence[int]], level: str) -> Communicator | None:
        return inter(groups, level) if level == "inter" else others(groups, level)

    return connect


def check_backend(backend: str | None, devices: Sequence[torch.device]) -> None:
    """Raise a ``ValueError`` if torch has no such backend, or it does not support the ranks' devices.

    Args:
        backend: A name, or several, such as ``"cpu:gloo,cuda:nccl"``. None: the default of each device.
        devices: Of the ranks.
    """
    if not backend:
        return
    argument = f"process_group_backend={backend!r}"
    by_device = dict(part.split(":", 1) for part in backend.lower().split(",") if ":" in part)
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    for name in by_device.values() if by_device else [backend.lower()]:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Use {', '.join(map(repr, known))}, or leave it out."
            raise ValueError(f"{argument}: torch has no backend {name!r}. {hint}")
        if not dist.is_backend_available(name):
            raise ValueError(f"{argument}: this torch was built without {name!r}. Leave it out, or use 'gloo'.")
    for kind in {device.type for device in devices}:
        own = by_device.get(kind) if by_device else backend.lower()
        if own is None or kind not in dist.Backend.backend_capability.get(own, [kind]):
            raise ValueError(
                f"{argument} does not support {kind} tensors, which the ranks have. Leave it out, or use 'gloo'."
            )


def process_group(communicator: Communicator) -> dist.ProcessGroup | None:
    """Return the process group of a communicator inside a node or over the world, which is always torch's."""
    if not isinstance(communicator, TorchCommunicator):
        raise TypeError(f"{type(communicator).__name__} is not over a torch process group")
    return communicator.group


def check_equal_work(topology: Topology, batches: int | float) -> None:
    """Raise a ``ValueError`` if ranks have unequal numbers of ``batches`` in an epoch; collective."""
    everyone = topology.world.all_gather_object(batches)
    if len(set(everyone)) > 1:
        lengths = f"{everyone} batches" if len(everyone) <= 16 else f"{min(everyone)} to {max(everyone)} batches"
        raise ValueError(
            f"the ranks' train dataloaders have unequal lengths: {lengths}. Every rank must take the same"
            " number of steps: give all ranks dataloaders of one length, set Trainer(limit_train_batches="
            f"{min(everyone)}), or let nodes without batches wait with HierarchicalStrategy(unequal_data=True)."
        )
