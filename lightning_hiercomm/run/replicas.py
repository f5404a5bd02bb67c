"""Which tensors of a module agree, and under which optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_hiercomm.comm.base import Communicator
from lightning_hiercomm.comm.dtensor import is_whole, local, whole
from lightning_hiercomm.nodes.bucket import BUCKET_BYTES
from lightning_hiercomm.nodes.buffers import homes_of_buffers, is_of_numbers, names_of_directions
from lightning_hiercomm.nodes.replica import Replica
from lightning_hiercomm.run.shards import reshard, share_out, shares_of
from lightning_hiercomm.schemes.health.verification import plain, print_of

_BUFFERS_IN_A_SUM = 2**16
"""Whether something is finite is seen by its sum, of which all buffers may be a part."""


class Replicas:
    """A module's trainable parameters and float (or complex) buffers, cut into one :class:`Replica` per optimizer.

    What an optimizer trains may change in mid-run: callbacks like BackboneFinetuning thaw parameters, or add groups. So
    a replica is made anew each time it is asked for, from what is trainable at that moment.

    Where the module is sharded over the node, a replica holds this rank's shards.

    A float buffer that holds infinities, NaN, or numbers so large that their sums may be, when training begins, is a
    mask or a bound and no statistic: it has no mean, and so does not travel in training. Once it has become finite on
    all ranks (the best loss so far), what is seen and saved holds its mean. The unit vectors of spectral norm have none
    either: there what is seen and saved holds the first rank's.

    Args:
        module: What trains.
        optimizers: The user's own, outside of any wrapper.
        bucket_bytes: Upper bound of a bucket's size in bytes.
        average_buffers: Whether float buffers (BatchNorm statistics) agree together with the parameters; or the names
            of those that do, in which ``*`` stands for anything.
        node: The dimensions of the mesh over which the node shards the module, and their sizes.

    Attributes:
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
        self.optimizers = list(optimizers)
        self.bucket_bytes = bucket_bytes
        self.average_buffers = average_buffers
        self._node = node or {}
        self.directions = names_of_directions(module)
        # by name, and not asked again when training has begun: then, ranks might decide differently
        self.without_mean = {name for name, lacks in self.lack_mean().items() if lacks}

    def lack_mean(self) -> dict[str, bool]:
        """Of each buffer, by its name, whether it has no mean on this rank at the moment."""
        named = self.module.named_buffers(remove_duplicate=False)
        return {name: name in self.directions or not has_mean(local(buffer)) for name, buffer in named}

    def check_names(self) -> None:
        """See that the module has what ``average_buffers`` names.

        Raises:
            ValueError: If nothing has such a name.
        """
        names = [name for name, buffer in self.module.named_buffers() if is_of_numbers(buffer)]
        patterns = [] if isinstance(self.average_buffers, bool) else self.average_buffers
        unknown = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
        if unknown:
            raise ValueError(
                f"average_buffers={list(patterns)!r}: no float buffer has a name like {unknown[0]!r}. They are"
                f" {', '.join(names[:20]) or 'none'}"
            )

    @property
    def device(self) -> torch.device:
        """Where the module's parameters live; the CPU if it has none."""
        return next((local(parameter).device for parameter in self.module.parameters()), torch.device("cpu"))

    def of(self, optimizer: Optimizer) -> Replica:
        """What agrees under an optimizer: its trainable parameters, and the buffers of the layers they belong to."""
        buffers = self._buffers_by_optimizer()
        own = next(index for index, other in enumerate(self.optimizers) if other is optimizer)
        trained = trained_by(optimizer)
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
            shares_of(trained, self._node),
            homes=homes_of_buffers(self.module),
        )

    def whole(self) -> Replica:
        """The module itself, whatever trains it: its parameters, frozen ones too, and the float buffers that agree."""
        floats = [buffer for _, buffer in self._buffers_that_agree()]
        self.have_written()
        parameters = [parameter for parameter in self.module.parameters() if is_of_numbers(parameter)]
        shares = shares_of(parameters, self._node)
        plain = [parameter for parameter in parameters if id(local(parameter)) not in shares]
        sharded = [local(parameter) for parameter in parameters if id(local(parameter)) in shares]
        return Replica(sharded, [*plain, *floats], self.bucket_bytes, shares=shares)

    def sees_memory(self) -> Callable[[Tensor], bool]:
        """What says whether a tensor is a parameter or buffer that the module has now, or a view of one."""

        def memory(tensor: Tensor) -> int | None:
            own = local(tensor)
            return own.untyped_storage().data_ptr() if own.layout == torch.strided and own.numel() else None

        held = {memory(each) for each in (*self.module.parameters(), *self.module.buffers())} - {None}
        return lambda tensor: memory(tensor) in held

    def of_no_scheme(self, known: Sequence[Replica], with_buffers: bool = True) -> list[Tensor]:
        """What no scheme averages, but somebody may move, the same on all ranks.

        Those are floating parameters that no optimizer trains (not those of a sharded module), buffers that had no mean
        when the run began, and those that a layer has got since.

        Args:
            known: What schemes hold.
            with_buffers: Whether to look for buffers.
        """
        trained = {id(parameter) for optimizer in self.optimizers for parameter in trained_by(optimizer)}
        parameters = [] if self._node else self.module.parameters()
        found: list[Tensor] = [p for p in parameters if id(p) not in trained and is_of_numbers(p) and p.numel()]
        if not with_buffers:
            return found
        held = {id(buffer) for replica in known for buffer in replica.buffers}
        lasting = homes_of_buffers(self.module)
        for name, given in self.module.named_buffers():
            buffer = local(given)
            is_late = id(buffer) not in held and id(buffer) in lasting
            if (name in self.without_mean or is_late) and is_of_numbers(buffer) and buffer.numel():
                found += [buffer] if is_whole(given) and self._may_agree(name) else []
        return found

    def has_changed(self, replica: Replica, optimizer: Optimizer) -> bool:
        """Whether the optimizer trains other parameters by now than those of ``replica``; the same on all ranks."""
        trained, known = trained_by(optimizer), replica.with_empty
        return len(trained) != len(known) or any(local(a) is not b for a, b in zip(trained, known, strict=True))

    def has_grown(self, replica: Replica, optimizer: Optimizer) -> bool:
        """Whether the optimizer trains parameters by now that ``replica`` does not hold; the same on all ranks."""
        known = set(map(id, replica.with_empty))
        return any(id(local(parameter)) not in known for parameter in trained_by(optimizer))

    def grown(self, replica: Replica, optimizer: Optimizer) -> list[Tensor]:
        """The parameters that the optimizer trains by now, and ``replica`` does not hold; none of a sharded module."""
        known = set(map(id, replica.parameters))
        return [] if self._node else [p for p in trained_by(optimizer) if id(p) not in known and is_of_numbers(p)]

    def checksum(self) -> list[int]:
        """One number for what this rank holds of each parameter, another one if somebody gives it other values."""
        self.have_written()  # or the module's parameters may be gathered ones
        return [int(print_of(local(parameter))) for parameter in self.module.parameters()]

    def have_written(self) -> None:
        """Tell the module that somebody wrote to its parameters outside of a training step."""
        if self._node:
            reshard(self.module)

    def whole_state(
        self, optimizer: Optimizer, replica: Replica, held: Sequence[Mapping[str, Any]], node: Communicator
    ) -> list[dict[str, Any]]:
        """State that a scheme has for this rank's shares of parameters, for the whole parameters. Collective.

        Args:
            optimizer: Trains the parameters.
            replica: Holds the shares.
            held: By name, the state of every parameter of ``replica``: one value per element, or one for all.
            node: The ranks that hold the other shares.

        Returns:
            By name, the state of every parameter that the optimizer trains, in its order: DTensors where it is sharded.
        """
        by_tensor = {id(tensor): state for tensor, state in zip(replica.parameters, held, strict=True)}
        parameters = trained_by(optimizer)
        shares = list(map(local, parameters))
        states = [by_tensor.get(id(share), {}) for share in shares]
        if self._node:  # a rank that has nothing of a parameter takes part for it, by what others have
            said = [
                _kinds(state, share) if share.numel() else None for state, share in zip(states, shares, strict=True)
            ]
            for place, (share, *kinds) in enumerate(zip(shares, *node.all_gather_object(said), strict=True)):
                if not share.numel():
                    of_others = next(kind for kind in kinds if kind is not None)
                    states[place] = {name: _nothing(share, kind) for name, kind in of_others.items()}
        return [
            {name: whole(v, parameter) if v.shape == share.shape else v for name, v in state.items()}
            for parameter, share, state in zip(parameters, shares, states, strict=True)
        ]

    def held_state(self, optimizer: Optimizer, states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Undo :meth:`whole_state`; the whole may be plain tensors, as another strategy writes them. Collective."""
        held = []
        for parameter, state in zip(trained_by(optimizer), states, strict=True):
            own = {name: share_out(v, parameter) if v.shape == parameter.shape else v for name, v in state.items()}
            if local(parameter).numel():
                held.append(own)
        return held

    def _buffers_by_optimizer(self) -> dict[int, list[Tensor]]:
        """Float buffers, each under the optimizer that trains the layer it belongs to (else the first)."""
        owner = {id(p): index for index, optimizer in enumerate(self.optimizers) for p in trained_by(optimizer)}
        buffers: dict[int, list[Tensor]] = {}
        agreeing = {id(buffer) for _, buffer in self._buffers_that_agree()}
        for layer in self.module.modules():
            index = next((owner[id(p)] for p in layer.parameters(recurse=False) if id(p) in owner), 0)
            own = map(local, layer.buffers(recurse=False))
            buffers.setdefault(index, []).extend(buffer for buffer in own if id(buffer) in agreeing)
        return buffers

    def _buffers_that_agree(self) -> list[tuple[str, Tensor]]:
        """Float buffers that have a mean, with their names; of DTensors those of which every rank holds all."""
        named = self.module.named_buffers(remove_duplicate=False)
        floats = [(name, b) for name, b in named if is_of_numbers(b) and name not in self.without_mean]
        return [(name, local(buffer)) for name, buffer in floats if is_whole(buffer) and self._may_agree(name)]

    def _may_agree(self, name: str) -> bool:
        if isinstance(self.average_buffers, bool):
            return self.average_buffers
        return any(fnmatchcase(name, pattern) for pattern in self.average_buffers)

    def parted(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Those that have a mean, and the unit vectors."""
        named = self.module.named_buffers(remove_duplicate=False)
        directions = {id(local(buffer)) for name, buffer in named if name in self.directions}
        with_mean = [tensor for tensor in tensors if id(tensor) not in directions]
        return with_mean, [tensor for tensor in tensors if id(tensor) in directions]


def check_initialized(module: nn.Module) -> None:
    """See that all parameters have values that ranks can compare, and send.

    Raises:
        RuntimeError: If some of a lazy module have none yet.
    """
    names = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if names:
        raise RuntimeError(
            f"Modules with uninitialized parameters ({', '.join(names)}) can't be used with a hierarchical strategy."
            " Run a dummy forward pass to correctly initialize the modules, or give lazy layers their sizes"
        )


def _kinds(state: Mapping[str, Tensor], share: Tensor) -> dict[str, Tensor | torch.dtype]:
    """What a parameter's state is made of: the type of what there is for each element, and the rest."""
    return {name: value.dtype if value.shape == share.shape else value for name, value in state.items()}


def _nothing(share: Tensor, kind: Tensor | torch.dtype) -> Tensor:
    return kind if isinstance(kind, Tensor) else torch.empty_like(share, dtype=kind)


def has_mean(buffer: Tensor) -> bool:
    """Whether it is of numbers, so far from infinity that two of them can be added, and all that is looked at."""
    if not is_of_numbers(buffer):
        return False
    if buffer.is_complex():
        buffer = torch.view_as_real(plain(buffer))
    sizes, widest = buffer.double().abs(), torch.finfo(torch.promote_types(buffer.dtype, torch.float32)).max
    return bool((sizes <= torch.finfo(buffer.dtype).max / 2).all() and sizes.sum() <= widest / _BUFFERS_IN_A_SUM)


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's trainable parameters; which of them have a gradient right now does not matter."""
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel())
    return list(dict.fromkeys(trained))


def broadcast_values(tensors: Sequence[Tensor], group: Communicator) -> None:
    """Give every rank of a group the values of its first rank."""
    for bucket in Replica(tensors).buckets:
        flat = bucket.pack()
        group.broadcast(flat, source=0).wait()
        bucket.unpack(flat)
