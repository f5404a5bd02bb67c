"""Selects the tensors of a module that each optimizer's scheme synchronizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.dtensor import is_whole, local, whole
from lightning_hiercomm.nodes.bucket import BUCKET_BYTES
from lightning_hiercomm.nodes.buffers import homes_of_buffers, is_of_numbers, names_of_directions
from lightning_hiercomm.nodes.checksums import plain, print_of
from lightning_hiercomm.nodes.ignored import ignored_by_ddp
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.run.shapes import check_shapes
from lightning_hiercomm.run.shards import own_shard, reshard, shard_specs

_BUFFERS_IN_A_SUM = 2**16
"""The preflight check adds up all buffers, so that each must be this much smaller than the largest number."""


class Replicas:
    """A module's trainable parameters and float (or complex) buffers, cut into one :class:`Replica` per optimizer.

    The parameters of an optimizer may change during a run: callbacks like BackboneFinetuning unfreeze some or add param
    groups. So :meth:`of` builds each replica from what is trainable at the time of the call.

    If the module is sharded over the node, a replica holds this rank's shards. What the module tells DDP to ignore
    stays each rank's own (:mod:`~lightning_hiercomm.nodes.ignored`).

    A float buffer that holds infinities, NaN or very large numbers when training begins is a mask or a bound, not a
    statistic. It has no mean and is not exchanged in training. Once it is finite on all ranks (the best loss so far),
    the averaged model holds its mean. For the unit vectors of spectral norm it holds those of the first rank.

    Args:
        module: The module that trains.
        optimizers: The user's optimizers, without any wrapper.
        bucket_bytes: Upper bound of a bucket's size in bytes.
        average_buffers: Whether to average float buffers (BatchNorm statistics) together with the parameters; or their
            names, in which ``*`` matches anything.
        node: The dimensions of the mesh over which the node shards the module, and their sizes.

    Attributes:
        slots: With elastic nodes, the names of the buffers that schemes average. None: all that have a mean.
        directions: Names of buffers that are unit vectors.
        without_mean: Names of these, and of buffers that had no mean when the run began.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        bucket_bytes: int = BUCKET_BYTES,
        average_buffers: bool | Sequence[str] = True,
        node: Mapping[str, int] | None = None,
    ) -> None:
        self.module = module
        self.slots: list[str] | None = None
        self.optimizers = list(optimizers)
        self.bucket_bytes = bucket_bytes
        self.average_buffers = average_buffers
        self._node = node or {}
        self.directions = names_of_directions(module)
        # decided once, because during training ranks might decide differently
        self.without_mean = {name for name, lacks in self.lack_mean().items() if lacks}

    def lack_mean(self) -> dict[str, bool]:
        """Return by name whether each buffer has no mean on this rank at the moment."""
        named = averaged_buffers(self.module, self.average_buffers)
        return {name: name in self.directions or not has_mean(local(buffer)) for name, buffer in named.items()}

    def check_names(self) -> None:
        """Check that the module has the buffers that ``average_buffers`` names."""
        ignored = ignored_by_ddp(self.module)
        named = self.module.named_buffers()
        names = [name for name, buffer in named if is_of_numbers(buffer) and name not in ignored]
        patterns = [] if isinstance(self.average_buffers, bool) else self.average_buffers
        unknown = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
        if unknown:
            raise ValueError(
                f"average_buffers={list(patterns)!r}: no float buffer has a name like {unknown[0]!r}. They are"
                f" {', '.join(names[:20]) or 'none'}{', without those that DDP ignores' if ignored else ''}"
            )

    def check_shapes(self, group: Communicator) -> None:
        """Raise a ``ValueError`` on all ranks if shapes of what they exchange differ. Collective."""
        check_shapes(self.module, group, self.device, averaged_buffers(self.module, self.average_buffers))

    def own_tensors(self, group: Communicator) -> set[str]:
        """Return the names of tensors that stay each rank's own, and are never broadcast. Collective.

        Raises:
            ValueError: On all ranks, as :meth:`check_shapes`.
        """
        return own_tensors(self.module, group, self.device, self.average_buffers)

    @property
    def not_averaged(self) -> set[str]:
        """The names of buffers, and of parameters that DDP ignores, that are never averaged."""
        return not_averaged(self.module, self.average_buffers) | ignored_by_ddp(self.module)

    def trained_by(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the optimizer's trainable parameters, except those that stay each rank's own."""
        own, trained = self._ignored_parameters(), trained_by(optimizer)
        return [parameter for parameter in trained if id(parameter) not in own] if own else trained

    def _ignored_parameters(self) -> set[int]:
        if not (names := ignored_by_ddp(self.module)):
            return set()
        return {id(parameter) for name, parameter in self.module.named_parameters() if name in names}

    @property
    def device(self) -> torch.device:
        """The device of the module's parameters, or the CPU if it has none."""
        return next((local(parameter).device for parameter in self.module.parameters()), torch.device("cpu"))

    def of(self, optimizer: Optimizer) -> Replica:
        """Return an optimizer's trainable parameters, and the float buffers of the layers that they belong to."""
        buffers = self._buffers_by_optimizer()
        own = next(index for index, other in enumerate(self.optimizers) if other is optimizer)
        trained = self.trained_by(optimizer)
        self.have_written()  # or the module's parameters may be gathered ones
        names = [(name, local(parameter)) for name, parameter in self.module.named_parameters()]
        own_buffers = set(map(id, buffers.get(own, ())))
        named_buffers = [(name, local(buffer)) for name, buffer in self.module.named_buffers()]
        names += [(name, buffer) for name, buffer in named_buffers if id(buffer) in own_buffers]
        return Replica(
            map(local, trained),
            buffers.get(own, ()),
            self.bucket_bytes,
            names,
            shard_specs(trained, self._node),
            homes=homes_of_buffers(self.module),
        )

    def whole(self) -> Replica:
        """Return all parameters of the module, frozen ones too, and its averaged float buffers, except ignored ones."""
        floats = [buffer for _, buffer in self._averaged_buffers()]
        self.have_written()
        own = self._ignored_parameters()
        parameters = [p for p in self.module.parameters() if is_of_numbers(p) and id(p) not in own]
        shares = shard_specs(parameters, self._node)
        plain = [parameter for parameter in parameters if id(local(parameter)) not in shares]
        sharded = [local(parameter) for parameter in parameters if id(local(parameter)) in shares]
        return Replica(sharded, [*plain, *floats], self.bucket_bytes, shares=shares)

    def sees_memory(self) -> Callable[[Tensor], bool]:
        """Return a predicate for tensors that are, or view, a present parameter or buffer of the module."""

        def memory(tensor: Tensor) -> int | None:
            own = local(tensor)
            if own.layout != torch.strided or is_traceable_wrapper_subclass(own) or not own.numel():
                return None  # without memory of its own: sparse, or made of other tensors, such as quantized state
            return own.untyped_storage().data_ptr()

        held = {memory(each) for each in (*self.module.parameters(), *self.module.buffers())} - {None}
        return lambda tensor: memory(tensor) in held

    def of_no_scheme(self, known: Sequence[Replica], with_buffers: bool = True) -> list[Tensor]:
        """Return tensors that no scheme averages, but that the program may change; the same on all ranks.

        These are floating-point parameters that no optimizer trains (except in a sharded module), buffers that had no
        mean when the run began, and buffers that were added since.
        """
        trained = {id(parameter) for optimizer in self.optimizers for parameter in trained_by(optimizer)}
        trained |= self._ignored_parameters()
        parameters = [] if self._node else self.module.parameters()
        found: list[Tensor] = [p for p in parameters if id(p) not in trained and is_of_numbers(p) and p.numel()]
        if not with_buffers:
            return found
        held = {id(buffer) for replica in known for buffer in replica.buffers}
        averaged = {id(each): each for each in averaged_buffers(self.module, self.average_buffers).values()}
        whole_ones = [local(each) for each in averaged.values() if is_whole(each)]
        return found + [buffer for buffer in whole_ones if id(buffer) not in held and buffer.numel()]

    def has_changed(self, replica: Replica, optimizer: Optimizer) -> bool:
        """Return whether the optimizer trains other parameters now than ``replica`` holds; the same on all ranks."""
        trained, known = self.trained_by(optimizer), replica.with_empty
        return len(trained) != len(known) or any(local(a) is not b for a, b in zip(trained, known, strict=True))

    def has_grown(self, replica: Replica, optimizer: Optimizer) -> bool:
        """Return whether the optimizer trains parameters that ``replica`` does not hold; the same on all ranks."""
        known = set(map(id, replica.with_empty))
        return any(id(local(parameter)) not in known for parameter in self.trained_by(optimizer))

    def grown(self, replica: Replica, optimizer: Optimizer) -> list[Tensor]:
        """Return parameters that the optimizer trains and ``replica`` does not hold; none of a sharded module."""
        known = set(map(id, replica.parameters))
        return [] if self._node else [p for p in self.trained_by(optimizer) if id(p) not in known and is_of_numbers(p)]

    @torch.no_grad()
    def checksums(self) -> dict[str, int]:
        """Return by name a checksum of what this rank holds of each parameter, except those that stay its own."""
        self.have_written()  # or the module's parameters may be gathered ones
        own = ignored_by_ddp(self.module)
        named = self.module.named_parameters()
        return {name: int(print_of(local(parameter))) for name, parameter in named if name not in own}

    def have_written(self) -> None:
        """Make a sharded module gather its parameters again, after a write outside of a training step."""
        if self._node:
            reshard(self.module)

    def whole_state(
        self, optimizer: Optimizer, replica: Replica, held: Sequence[Mapping[str, Any]], node: Communicator
    ) -> list[dict[str, Any]]:
        """Return for whole parameters the state that a scheme holds for this rank's shards. Collective.

        Args:
            optimizer: Trains the parameters.
            replica: Holds the shards.
            held: By name, the state of every parameter of ``replica``: one value per element, or one for all.
            node: The ranks that hold the other shards.

        Returns:
            By name, the state of every parameter that the optimizer trains, in its order: DTensors where it is sharded.
        """
        by_tensor = {id(tensor): state for tensor, state in zip(replica.parameters, held, strict=True)}
        parameters = self.trained_by(optimizer)
        shards = list(map(local, parameters))
        states = [by_tensor.get(id(shard), {}) for shard in shards]
        if self._node:  # a rank with an empty shard of a parameter takes part with the others' kinds of state
            own_kinds = [
                _kinds(state, shard) if shard.numel() else None for state, shard in zip(states, shards, strict=True)
            ]
            for place, (shard, *kinds) in enumerate(zip(shards, *node.all_gather_object(own_kinds), strict=True)):
                if not shard.numel():
                    of_others = next(kind for kind in kinds if kind is not None)
                    states[place] = {
                        name: kind if isinstance(kind, Tensor) else torch.empty_like(shard, dtype=kind)
                        for name, kind in of_others.items()
                    }
        return [
            {name: whole(v, parameter) if v.shape == shard.shape else v for name, v in state.items()}
            for parameter, shard, state in zip(parameters, shards, states, strict=True)
        ]

    def held_state(self, optimizer: Optimizer, states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Undo :meth:`whole_state`, also from the plain tensors that other strategies save. Collective."""
        held = []
        for parameter, state in zip(self.trained_by(optimizer), states, strict=True):
            own = {name: own_shard(v, parameter) if v.shape == parameter.shape else v for name, v in state.items()}
            if local(parameter).numel():
                held.append(own)
        return held

    def fix_slots(self) -> None:
        """Average the present buffers from now on, and none that are registered later."""
        self.slots = [name for name, _ in self._averaged_buffers()]

    def _buffers_by_optimizer(self) -> dict[int, list[Tensor]]:
        """Return float buffers by the optimizer that trains their layer (otherwise the first)."""
        owner = {id(p): index for index, optimizer in enumerate(self.optimizers) for p in trained_by(optimizer)}
        buffers: dict[int, list[Tensor]] = {}
        for name, buffer in self._averaged_buffers():
            layer = self.module.get_submodule(name.rpartition(".")[0])
            index = next((owner[id(p)] for p in layer.parameters(recurse=False) if id(p) in owner), 0)
            buffers.setdefault(index, []).append(buffer)
        return buffers

    def _averaged_buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers that have a mean, with their names; of DTensors only replicated ones."""
        averaged = averaged_buffers(self.module, self.average_buffers)
        if self.slots is not None:
            return [(name, local(averaged[name])) for name in self.slots]
        with_mean = [(name, each) for name, each in averaged.items() if name not in self.without_mean]
        return [(name, local(each)) for name, each in with_mean if is_whole(each)]

    def parted(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Split tensors into those that have a mean, and unit vectors."""
        named = self.module.named_buffers(remove_duplicate=False)
        directions = {id(local(buffer)) for name, buffer in named if name in self.directions}
        with_mean = [tensor for tensor in tensors if id(tensor) not in directions]
        return with_mean, [tensor for tensor in tensors if id(tensor) in directions]


def averaged_buffers(module: nn.Module, average_buffers: bool | Sequence[str]) -> dict[str, Tensor]:
    """Return the persistent floating-point buffers that ``average_buffers`` selects, by name."""
    if average_buffers is False:
        return {}
    homes, ignored = homes_of_buffers(module), ignored_by_ddp(module)
    return {
        name: buffer
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if is_of_numbers(buffer)
        and name not in ignored
        and homes[id(local(buffer))].is_persistent
        and (average_buffers is True or any(fnmatchcase(name, pattern) for pattern in average_buffers))
    }


def not_averaged(module: nn.Module, average_buffers: bool | Sequence[str]) -> set[str]:
    """Return the names of a module's other buffers."""
    averaged = averaged_buffers(module, average_buffers)
    return {name for name, _ in module.named_buffers(remove_duplicate=False) if name not in averaged}


def own_tensors(
    module: nn.Module, group: Communicator, device: torch.device, average_buffers: bool | Sequence[str]
) -> set[str]:
    """Check shapes before training; return the names of tensors that stay each rank's own. Collective.

    They are those that DDP ignores, and buffers that are not averaged and whose shapes differ.
    """
    averaged = averaged_buffers(module, average_buffers)
    return check_shapes(module, group, device, averaged, before_training=True) | ignored_by_ddp(module)


def tensors_without(module: nn.Module, names: Collection[str]) -> list[Tensor]:
    """Return a module's parameters and buffers, except those of some names."""
    named = (*module.named_parameters(), *module.named_buffers())
    return [tensor for name, tensor in named if name not in names]


def check_initialized(module: nn.Module) -> None:
    """Check that all parameters of lazy modules are initialized."""
    names = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if names:
        raise RuntimeError(
            f"Modules with uninitialized parameters ({', '.join(names)}) can't be used with a hierarchical strategy."
            " Run a dummy forward pass to correctly initialize the modules, or give lazy layers their sizes"
        )


def _kinds(state: Mapping[str, Tensor], shard: Tensor) -> dict[str, Tensor | torch.dtype]:
    """Return a parameter's state, with only the dtype of entries that have one value per element."""
    return {name: value.dtype if value.shape == shard.shape else value for name, value in state.items()}


def has_mean(buffer: Tensor) -> bool:
    """Return whether a buffer holds finite numbers, small enough to be added over ranks and in the preflight check."""
    if not is_of_numbers(buffer):
        return False
    if buffer.is_complex():
        buffer = torch.view_as_real(plain(buffer))
    sizes, widest = buffer.double().abs(), torch.finfo(torch.promote_types(buffer.dtype, torch.float32)).max
    return bool((sizes <= torch.finfo(buffer.dtype).max / 2).all() and sizes.sum() <= widest / _BUFFERS_IN_A_SUM)


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the optimizer's trainable parameters, with or without a gradient."""
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel())
    return list(dict.fromkeys(trained))


def broadcast_values(tensors: Sequence[Tensor], group: Communicator) -> None:
    """Give every rank of a group the values of its first rank."""
    for bucket in Replica(tensors).buckets:
        flat = bucket.pack()
        group.broadcast(flat, source=0).wait()
        bucket.unpack(flat)
