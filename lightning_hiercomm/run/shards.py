"""The shards of a model that a rank holds: the local tensors of DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from lightning_hiercomm.comm.dtensor import DTensor, Shard, distribute_tensor, fully_sharded_modules, local
from lightning_hiercomm.nodes.bucket import ShardSpec


def shard_specs(tensors: Iterable[Tensor], node: Mapping[str, int]) -> dict[int, ShardSpec]:
    """Return which shard of the whole tensor each local tensor is, by its ``id``; plain tensors are left out."""
    return {id(local(tensor)): _shard_spec(tensor, node) for tensor in tensors if isinstance(tensor, DTensor)}


def _shard_spec(tensor: DTensor, node: Mapping[str, int]) -> ShardSpec:
    names = tensor.device_mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(node):
        raise ValueError(
            f"a parameter of shape {tuple(tensor.shape)} is distributed over the mesh {names or 'without names'}, which"
            f" is not part of the node's: apply parallelism to self.device_mesh ({', '.join(node)}) in configure_model"
        )
    sharded = [
        (name, placement)
        for name, placement in zip(names, tensor.placements, strict=True)
        if node[name] > 1 and not placement.is_replicate()
    ]
    if any(placement.is_partial() for _, placement in sharded):
        raise ValueError(f"a parameter of shape {tuple(tensor.shape)} holds partial sums: shard or replicate it")
    others = [name for name, size in node.items() if size > 1 and name not in dict(sharded)]
    held_by = "rank" if not others else "node" if not sharded else others[0]
    return ShardSpec(held_by, tensor.numel(), _start(tensor, [placement for _, placement in sharded]))


def _start(tensor: DTensor, placements: Sequence[object]) -> int | None:
    """Return the offset of a local tensor in the flattened whole, if it is contiguous there: whole rows, or all."""
    if not placements:
        return 0
    first = placements[0]
    if len(placements) > 1 or type(first) is not Shard or first.dim != 0:
        return None
    index = next(i for i, placement in enumerate(tensor.placements) if placement is first)
    rows, ranks = tensor.shape[0], tensor.device_mesh.size(index)
    before = min(tensor.device_mesh.get_local_rank(index) * -(-rows // ranks), rows)
    return before * (tensor.numel() // rows if rows else 0)


def own_shard(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a whole tensor, distributed like ``like``. Collective over the node."""
    if not isinstance(like, DTensor):
        return value
    if isinstance(value, DTensor):
        return local(value)
    return local(distribute_tensor(value.to(local(like).device), like.device_mesh, like.placements))


def placed_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Redistribute a gradient like its parameter; partial sums are summed. Collective over the node."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def reshard(module: nn.Module) -> None:
    """Make FSDP2 drop gathered parameters, which would hide a write to their shards."""
    for submodule in fully_sharded_modules(module):
        submodule.reshard()
